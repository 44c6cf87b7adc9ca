"""Turn the end of a communicator into errors."""
