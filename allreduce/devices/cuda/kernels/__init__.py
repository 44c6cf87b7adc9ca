"""GPU kernels of operators and optimizers: what is launched for which arrays."""
