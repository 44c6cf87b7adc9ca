"""GPUs of NVIDIA: the driver through cuda.bindings, arrays as views of CuPy's kind.

Only `runtime.py` is imported before a GPU is used, and it imports no CUDA package.
"""
