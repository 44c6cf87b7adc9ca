"""Split a program by device and task; carry tensors between the parts."""
