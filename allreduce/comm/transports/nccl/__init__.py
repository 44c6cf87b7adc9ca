"""The transport of GPUs: NCCL for their arrays, beside a CPU transport for everything else."""
