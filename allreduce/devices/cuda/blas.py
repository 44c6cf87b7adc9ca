"""Matrix products by cuBLAS, through the few C functions that they need.

CuPy's binding asks the CUDA runtime first and refuses graph capture; ctypes does neither.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from allreduce.devices import options
from allreduce.devices.cuda.arrays import ALIGNED
from allreduce.devices.cuda.driver import missing_library
from allreduce.devices.cuda.streams import CudaStream, rehearsal
from allreduce.errors import InternalError, OutOfMemoryError

_SONAMES = ("libcublas.so.12", "libcublas.so.13")
# Bytes; what NVIDIA recommends for Hopper, and more than other architectures need. With cuBLAS's
# own workspace, products of several streams would share memory.
_WORKSPACE = 32 << 20
# cudaDataType_t, cublasComputeType_t, the type of alpha and beta, and bytes of an element.
_KINDS: dict[str, tuple[int, int, Any, int]] = {
    "float32": (0, 68, ctypes.c_float, 4),
    "float64": (1, 70, ctypes.c_double, 8),
    "float16": (2, 68, ctypes.c_float, 2),
    "bfloat16": (14, 68, ctypes.c_float, 2),
}
# Of float32: operands are rounded to these; sums stay float32.
_FAST_BFLOAT16, _FAST_TF32 = 75, 77
_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT
NORMAL, TRANSPOSED = 0, 1


class Operand(NamedTuple):
    """A matrix of a product, or a batch of them.

    Attributes:
        address: Of its first element.
        leading: Elements from column to column.
        step: Elements from matrix to matrix.
    """

    address: int
    leading: int
    step: int = 0


@dataclass(frozen=True)
class Product:
    """A product `C = op(A) op(B)` of column-major matrices, or a batch of them.

    Attributes:
        dtype: Of all three.
        transposes: Of A and B: NORMAL or TRANSPOSED.
        sizes: Rows and columns of C, and the inner size.
        operands: A, B and C.
        batch: How many products.
        adds: Whether they are added to C.
        short: Whether operands of float32 have been rounded to bfloat16.
    """

    dtype: str
    transposes: tuple[int, int]
    sizes: tuple[int, int, int]
    operands: tuple[Operand, Operand, Operand]
    batch: int = 1
    adds: bool = False
    short: bool = False

    @property
    def compute(self) -> int:
        """How it is computed, a cublasComputeType_t."""
        if self.dtype == "float32" and self.short:
            return _FAST_BFLOAT16
        if self.dtype == "float32" and options.current().tf32:
            return _FAST_TF32
        return _KINDS[self.dtype][1]

    @property
    def extents(self) -> list[int]:
        """The bytes that A, B and C lie in."""
        (m, n, k), size = self.sizes, _KINDS[self.dtype][3]
        columns = (m if self.transposes[0] else k, k if self.transposes[1] else n, n)
        pairs = zip(self.operands, columns, strict=True)
        return [(x.step * (self.batch - 1) + x.leading * count) * size for x, count in pairs]

    def at(self, addresses: tuple[int, int, int]) -> Product:
        """Return the same product of matrices that are aligned like these, but lie elsewhere."""
        a, b, c = (
            each._replace(address=address + each.address % ALIGNED)
            for each, address in zip(self.operands, addresses, strict=True)
        )
        return replace(self, operands=(a, b, c))


@cache
def _library() -> Any:
    """Load cuBLAS: one that is loaded already, or that of NVIDIA's package."""
    for soname in _SONAMES:
        try:
            return ctypes.CDLL(soname)
        except OSError:
            continue
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except DynamicLibNotFoundError as error:
        raise missing_library("cuBLAS", error) from None


class Handle:
    """A cuBLAS handle with its own workspace, for one stream.

    Args:
        stream: The stream of its products.
    """

    def __init__(self, stream: CudaStream) -> None:
        stream.device.enter()
        self._blas, self._stream = _library(), stream
        self._loaded: set[tuple[Product, int]] = set()
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

    def multiply(self, product: Product) -> None:
        """Enqueue a product; in a rehearsal, load cuBLAS's kernels for it only."""
        under_way = rehearsal()
        if under_way is None:
            self._enqueue(product)
        elif (key := (product.at((0, 0, 0)), product.compute)) not in self._loaded:
            if self._load(product):
                self._loaded.add(key)
            else:
                under_way.is_complete = False

    def _load(self, product: Product) -> bool:
        """Have cuBLAS load the kernels that it chooses for a product, which it does at the first.

        It is computed in memory of no other use, whose values do not matter.
        """
        *inputs, output = product.extents
        apart = -(-max(inputs) // ALIGNED) * ALIGNED + ALIGNED
        try:
            block = self._stream.device.card.memory.block(apart + output + ALIGNED)
        except OutOfMemoryError:
            return False
        self._enqueue(product.at((block.address, block.address, block.address + apart)))
        self._stream.synchronize()  # the next one may take the block
        return True

    def _enqueue(self, product: Product) -> None:
        data, _, scalar, _ = _KINDS[product.dtype]
        one, kept = scalar(1.0), scalar(1.0 if product.adds else 0.0)
        (a, lda, step_a), (b, ldb, step_b), (c, ldc, step_c) = product.operands
        m, n, k = (ctypes.c_int(size) for size in product.sizes)
        long, at = ctypes.c_longlong, ctypes.c_void_p
        self._call(
            "cublasGemmStridedBatchedEx",
            *(self._handle, *product.transposes, m, n, k, ctypes.byref(one)),
            *(at(a), data, ctypes.c_int(lda), long(step_a)),
            *(at(b), data, ctypes.c_int(ldb), long(step_b), ctypes.byref(kept)),
            *(at(c), data, ctypes.c_int(ldc), long(step_c)),
            *(ctypes.c_int(product.batch), product.compute, _DEFAULT),
        )


def handle_of(stream: CudaStream) -> Handle:
    """Return a stream's handle, which is made when its first product is."""
    found: Handle | None = stream.blas
    if found is None:
        found = stream.blas = Handle(stream)
    return found
