"""PyTorch's and JAX's arrays: used in place, with results of the same kind."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.arguments.arrays import dtype_named
from allreduce.errors import UsageError
from tests.comm.cases.drawn import lend, read
from tests.comm.cases.operator_cases import assert_same, exact, fold

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int64", "uint8", "complex64")
SHAPES = ((), (0, 3), (5,), (30, 400))


def answered(comm: Communicator, library: str) -> None:
    """Every collective gives an array of the library that it was given one of, of the same type."""
    kind = type(lend(np.ones(1), library))
    for dtype in DTYPES:
        for shape in SHAPES:
            count = int(np.prod(shape))
            inputs = [exact(dtype, member, count).reshape(shape) for member in range(comm.size)]
            x = lend(inputs[comm.rank], library)
            found: list[tuple[Any, Any]] = [
                (comm.all_reduce(x), fold("sum", inputs)),
                (comm.all_reduce(x, async_op=True).wait(), fold("sum", inputs)),
                (comm.broadcast(x, root=comm.size - 1), inputs[-1]),
                (comm.all_gather(x), np.concatenate([np.atleast_1d(one) for one in inputs])),
                (comm.all_reduce([x, x])[1], fold("sum", inputs)),
            ]
            if shape and shape[0] % comm.size == 0:
                shares = [np.split(one, comm.size)[comm.rank] for one in inputs]
                found += [
                    (comm.reduce_scatter(x), fold("sum", shares)),
                    (comm.all_to_all(x), np.concatenate(shares)),
                ]
            for result, wanted in found:
                assert isinstance(result, kind)
                assert_same(read(result), wanted, f"{dtype} {shape}")
            assert_same(read(x), inputs[comm.rank])


def of_torch(comm: Communicator) -> None:
    """Tensors take results too, where they lie: strided, in place, with or without gradients."""
    torch = import_module("torch")
    answered(comm, "torch")
    total = comm.size * (comm.size + 1) / 2
    for dtype in (torch.float32, torch.bfloat16):
        spread = torch.zeros(6, 8, dtype=dtype)
        x, out = torch.full((4, 3), comm.rank + 1.0, dtype=dtype), spread[::2, ::2]
        assert comm.all_reduce(x.T, out=out) is out
        assert torch.equal(out, torch.full((3, 4), total, dtype=dtype))
        assert not spread[1::2].any()
        assert not spread[:, 1::2].any()
        assert comm.all_reduce(x, out=x, async_op=True).wait() is x
        assert (x == total).all()
        weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        assert comm.all_reduce(weight, out=weight.data) is not weight
        assert (weight == comm.size).all()
        got = torch.zeros(5, dtype=dtype)
        received = comm.recv(got, (comm.rank - 1) % comm.size, async_op=True)
        sent = comm.send(torch.full((5,), comm.rank, dtype=dtype), (comm.rank + 1) % comm.size)
        assert sent is None
        assert received.wait() is got
        assert (got == (comm.rank - 1) % comm.size).all()
    number = torch.tensor(2.0)
    comm.all_reduce(number, out=number)
    assert number == 2 * comm.size


def of_jax(comm: Communicator) -> None:
    """Read-only arrays cannot be outputs; writable ones can."""
    answered(comm, "jax")
    x = lend(np.full(1000, comm.rank + 1.0), "jax")
    with pytest.raises(UsageError, match="out is read-only"):
        comm.all_reduce(x, out=x)
    with pytest.raises(UsageError, match="out is read-only"):
        comm.recv(x, 0)
    out = np.zeros(1000)
    assert comm.all_reduce(x, out=out) is out
    assert (out == comm.size * (comm.size + 1) / 2).all()
    narrow = lend(np.ones((3, 4), dtype_named("bfloat16")), "jax")
    assert str(comm.all_reduce(narrow[:, ::2]).dtype) == "bfloat16"
