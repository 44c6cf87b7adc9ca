"""Order a graph into a program over streams, with buffers planned."""
