"""This host: machine, addresses, descriptors, launchers' variables."""
