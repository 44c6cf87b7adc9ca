"""Where computation and memory are: names, devices, buffers, streams and events."""
