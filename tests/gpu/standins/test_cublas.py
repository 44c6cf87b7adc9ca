"""The stand-in cuBLAS: products of all layouts and types, and the calls that it refuses."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device

from tests.gpu import launch
from tests.gpu.kernels.calls import call
from tests.gpu.standins.test_streams import blocks, new_stream

pytestmark = pytest.mark.skipif(launch.has_driver(), reason="tests the stand-in itself")
FLOAT32, FLOAT64, FLOAT16 = 0, 1, 2
COMPUTE = {FLOAT32: 68, FLOAT16: 68, FLOAT64: 70}
KINDS = {FLOAT32: np.float32, FLOAT16: np.float16, FLOAT64: np.float64}


@pytest.fixture
def cublas() -> Any:
    """Load the library and make a handle."""
    Device(0).set_current()
    library: Any = ctypes.CDLL("libcublas.so.12")
    library.handle = ctypes.c_void_p()
    assert library.cublasCreate_v2(ctypes.byref(library.handle)) == 0
    yield library
    assert library.cublasDestroy_v2(library.handle) == 0


def put(values: np.ndarray) -> ctypes.c_void_p:
    at = int(call(driver.cuMemAlloc(max(values.nbytes, 1))))
    call(driver.cuMemcpyHtoD(at, values.ctypes.data, values.nbytes))
    return ctypes.c_void_p(at)


def get(at: ctypes.c_void_p, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    call(driver.cuCtxSynchronize())
    call(driver.cuMemcpyDtoH(out.ctypes.data, at.value, out.nbytes))
    return out


def product(cublas: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray, ops: str, **odd: Any) -> int:
    """Multiply column-major matrices (columns, rows) into `c`; returns cuBLAS's status."""
    kind = {np.dtype(value): key for key, value in KINDS.items()}[a.dtype]
    wide = ctypes.c_double if kind == FLOAT64 else ctypes.c_float
    is_a, is_b = (letter == "T" for letter in ops)
    n, m = c.shape
    k = a.shape[1] if is_a else a.shape[0]
    places = [put(each) for each in (a, b, c)]
    status = cublas.cublasGemmEx(
        *(cublas.handle, int(is_a), int(is_b), m, n, k, ctypes.byref(wide(2.0))),
        *(places[0], kind, odd.get("lda", a.shape[1]), places[1], kind, b.shape[1]),
        *(ctypes.byref(wide(odd.get("beta", 0.0))), places[2], kind, c.shape[1]),
        *(odd.get("compute", COMPUTE[kind]), -1),
    )
    c[:] = get(places[2], c)
    return int(status)


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16, FLOAT64])
@pytest.mark.parametrize("ops", ["NN", "TN", "NT", "TT"])
def test_products_of_all_layouts(cublas: Any, ops: str, kind: int) -> None:
    rng = np.random.default_rng(0)
    m, n, k = 5, 7, 3
    a, b = rng.integers(-4, 4, (k, m)), rng.integers(-4, 4, (n, k))
    expected = 2.0 * b @ a
    given_a = np.ascontiguousarray(a.T if ops[0] == "T" else a).astype(KINDS[kind])
    given_b = np.ascontiguousarray(b.T if ops[1] == "T" else b).astype(KINDS[kind])
    c = np.full((n, m), np.nan, KINDS[kind])  # with beta 0 it is not read
    assert product(cublas, given_a, given_b, c, ops) == 0
    np.testing.assert_array_equal(c, expected)


def test_beta_adds_to_what_is_there(cublas: Any) -> None:
    one = np.ones((2, 2), np.float32)
    c = np.ones((2, 2), np.float32)
    assert product(cublas, one, one, c, "NN", beta=3.0) == 0
    np.testing.assert_array_equal(c, np.full((2, 2), 7.0))


def test_a_batch_with_strides(cublas: Any) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 4, (6, 3, 5)).astype(np.float32)
    b = rng.integers(-4, 4, (7, 3)).astype(np.float32)  # one for all: stride 0
    c = np.empty((6, 7, 5), np.float32)
    at, bt, ct = put(a), put(b), put(c)
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    status = cublas.cublasGemmStridedBatchedEx(
        *(cublas.handle, 0, 0, 5, 7, 3, one, at, 0, 5, ctypes.c_longlong(15)),
        *(bt, 0, 3, ctypes.c_longlong(0), zero, ct, 0, 5, ctypes.c_longlong(35), 6, 68, -1),
    )
    assert status == 0
    np.testing.assert_array_equal(get(ct, c), b @ a)


def test_the_first_product_of_a_kind_waits_for_the_device(cublas: Any) -> None:
    """The real one loads the kernels that it chooses then."""
    at = put(np.ones((16, 16), np.float32))
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))

    def multiply(m: int) -> None:
        status = cublas.cublasSgemm_v2(
            *(cublas.handle, 0, 0, m, 5, 5, one, at, 16, at, 16, zero, at, 16)
        )
        assert status == 0

    stream = new_stream()
    for m in (11, 13):
        assert blocks(partial(multiply, m), stream)
        assert not blocks(partial(multiply, m), stream)


@pytest.mark.parametrize("odd", [{"lda": 1}, {"compute": 70}])
def test_wrong_calls_are_refused(cublas: Any, odd: dict[str, int]) -> None:
    one = np.ones((2, 2), np.float32)
    assert product(cublas, one, one, one.copy(), "NN", **odd) in (7, 15)
