"""Turn what ended a communicator into errors."""
