"""Matrix products by cuBLAS, through the few C functions that they need.

CuPy's binding asks the CUDA runtime first and refuses graph capture; ctypes does neither.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from allreduce.devices import options
from allreduce.devices.cuda.streams import CudaStream, rehearses
from allreduce.errors import InternalError

_SONAMES = ("libcublas.so.12", "libcublas.so.13")
# Bytes; what NVIDIA recommends for Hopper, and more than other architectures need. With cuBLAS's
# own workspace, products of several streams would share memory.
_WORKSPACE = 32 << 20
# cudaDataType_t, cublasComputeType_t, and the type of alpha and beta.
_KINDS: dict[str, tuple[int, int, Any]] = {
    "float32": (0, 68, ctypes.c_float),
    "float64": (1, 70, ctypes.c_double),
    "float16": (2, 68, ctypes.c_float),
    "bfloat16": (14, 68, ctypes.c_float),
}
# Of float32: operands are rounded to these; sums stay float32.
_FAST_BFLOAT16, _FAST_TF32 = 75, 77
_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT
NORMAL, TRANSPOSED = 0, 1


@cache
def _library() -> Any:
    """Load cuBLAS: one that is loaded already, or that of NVIDIA's package."""
    for soname in _SONAMES:
        try:
            return ctypes.CDLL(soname)
        except OSError:
            continue
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)


class Handle:
    """A cuBLAS handle with its own workspace, for one stream.

    Args:
        stream: The stream of its products.
    """

    def __init__(self, stream: CudaStream) -> None:
        stream.device.enter()
        self._blas = _library()
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace = stream.device.card.memory.block(_WORKSPACE)
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(int(stream.handle)))
        self._call(
            "cublasSetWorkspace_v2",
            *(self._handle, ctypes.c_void_p(self._workspace.address)),
            ctypes.c_size_t(_WORKSPACE),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._blas, name)(*arguments)
        if status:
            raise InternalError(f"{name} failed with status {status} of cuBLAS")

    def product(
        self,
        dtype: str,
        transposes: tuple[int, int],
        sizes: tuple[int, int, int],
        operands: tuple[tuple[int, int, int], ...],
        batch: int,
        *,
        adds: bool = False,
        short: bool = False,
    ) -> None:
        """Compute column-major `C = op(A) op(B)`, for each matrix of a batch.

        Args:
            dtype: Of all three.
            transposes: Of A and B: NORMAL or TRANSPOSED.
            sizes: Rows and columns of C, and the inner size.
            operands: Address, leading dimension and step from matrix to matrix of A, B and C, in
                elements.
            batch: How many products.
            adds: Whether they are added to C.
            short: Whether operands of float32 have been rounded to bfloat16.
        """
        if rehearses():
            return
        data, compute, scalar = _KINDS[dtype]
        if dtype == "float32":
            fast = _FAST_TF32 if options.current().tf32 else compute
            compute = _FAST_BFLOAT16 if short else fast
        one, kept = scalar(1.0), scalar(1.0 if adds else 0.0)
        (a, lda, step_a), (b, ldb, step_b), (c, ldc, step_c) = operands
        m, n, k = (ctypes.c_int(size) for size in sizes)
        long, at = ctypes.c_longlong, ctypes.c_void_p
        self._call(
            "cublasGemmStridedBatchedEx",
            *(self._handle, *transposes, m, n, k, ctypes.byref(one)),
            *(at(a), data, ctypes.c_int(lda), long(step_a)),
            *(at(b), data, ctypes.c_int(ldb), long(step_b), ctypes.byref(kept)),
            *(at(c), data, ctypes.c_int(ldc), long(step_c)),
            *(ctypes.c_int(batch), compute, _DEFAULT),
        )


def handle_of(stream: CudaStream) -> Handle:
    """Return a stream's handle, which is made when its first product is."""
    found: Handle | None = stream.blas
    if found is None:
        found = stream.blas = Handle(stream)
    return found
