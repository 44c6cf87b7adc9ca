"""Accepted arrays and numbers, and errors with a remedy for others."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from allreduce.comm.arguments import arrays
from allreduce.errors import UsageError


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (b"abc", "uint8"),
        (bytearray(b"abc"), "uint8"),
        (memoryview(b"abc"), "uint8"),
        ((ctypes.c_float * 3)(1, 2, 3), "float32"),
        (array.array("d", [1, 2, 3]), "float64"),
    ],
)
def test_what_has_the_buffer_protocol_is_an_array(x: Any, dtype: str) -> None:
    lent = arrays.borrow("here", x)
    assert lent.array.dtype == dtype
    assert lent.array.shape == (3,)


def test_a_mapped_file_is_an_array_and_its_memory_is_shared() -> None:
    with mmap.mmap(-1, 16) as mapped:
        lent = arrays.borrow_out("here", mapped)
        lent[3] = 7
        assert mapped[3] == 7
        del lent


def test_a_subclass_is_a_plain_array_of_the_same_memory() -> None:
    records = np.ones(2).view(np.recarray)
    lent = arrays.borrow("here", records).array
    assert type(lent) is np.ndarray
    assert np.shares_memory(lent, records)


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(UsageError, match=r"here got a masked array.*filled\(\)"):
        arrays.borrow("here", np.ma.array([1.0, 2.0], mask=[False, True]))


def test_memory_that_was_let_go_is_refused() -> None:
    memory = memoryview(b"abc")
    memory.release()
    with pytest.raises(UsageError, match="here cannot read this memoryview"):
        arrays.borrow("here", memory)


@pytest.mark.parametrize("x", [None, "text", {1}, object(), [1]])
def test_what_is_no_array(x: Any) -> None:
    name = "None" if x is None else type(x).__name__
    with pytest.raises(UsageError, match=f"here takes an array or a number, but got {name}"):
        arrays.borrow("here", x)
    with pytest.raises(UsageError, match=f"here must be an array, but got {name}"):
        arrays.borrow_out("here", x)


def test_a_number_is_no_output() -> None:
    with pytest.raises(UsageError, match="must be an array, but got float"):
        arrays.borrow_out("here", 3.0)


class TestTensors:
    """Tensors whose memory is not simply their values."""

    @pytest.fixture(scope="class")
    @classmethod
    def torch(cls) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.filterwarnings("ignore")  # torch warns that some refused tensors are deprecated
    def test_each_is_refused_with_its_remedy(self, torch: Any) -> None:
        ones = torch.ones(3)
        complex_ones = torch.ones(3, dtype=torch.complex64)
        for x, says in (
            (complex_ones.conj(), r"resolve_conj\(\)"),
            (complex_ones.conj().imag, r"resolve_neg\(\)"),
            (ones.to_sparse(), r"to_dense\(\)"),
            (torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8), "cannot read this Tensor"),
            (torch.nested.nested_tensor([ones, torch.ones(2)]), "cannot read this"),
            (torch.ones(3, device="meta"), "cannot read this Tensor"),
            (ones.to(torch.float8_e4m3fn), "cannot read this Tensor"),
        ):
            with pytest.raises(UsageError, match=says):
                arrays.borrow("here", x)

    def test_others_are_viewed(self, torch: Any) -> None:
        for x in (torch.nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.bfloat16)):
            lent = arrays.borrow("here", x)
            assert lent.array.shape == (3,)
            assert torch.equal(lent.answer(lent.array), x.detach())


class TestJax:
    """JAX arrays that have no memory."""

    @pytest.fixture(scope="class")
    @classmethod
    def jax(cls) -> Any:
        return pytest.importorskip("jax")

    def test_a_tracer_is_refused(self, jax: Any) -> None:
        with pytest.raises(UsageError, match=r"outside jax\.jit"):
            jax.jit(lambda x: arrays.borrow("here", x).array)(np.ones(3))

    def test_a_deleted_array_is_refused(self, jax: Any) -> None:
        x = jax.numpy.ones(3)
        x.delete()
        with pytest.raises(UsageError, match="deleted"):
            arrays.borrow("here", x)
