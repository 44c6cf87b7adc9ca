"""Compare what ranks are about to do, and carry failures between them."""
