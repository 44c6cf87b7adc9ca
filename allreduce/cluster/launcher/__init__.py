"""`allreduce.run`: start ranks on this host and watch them."""
