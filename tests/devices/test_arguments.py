"""Wrong arguments are named with what was expected; NumPy's integers are integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allreduce import devices
from allreduce.devices import Buffer, DeviceName, lookup, options
from allreduce.devices.inventory import Inventory
from allreduce.errors import DeviceError, UsageError


@pytest.fixture
def buffer() -> Buffer:
    return lookup("CPU:0").allocate(64)


@pytest.mark.parametrize("shape", [np.int64(4), (np.int32(4),), [4]])
def test_a_shape_may_be_numpys_integers(buffer: Buffer, shape: Any) -> None:
    assert buffer.array("float32", shape, 8).shape == (4,)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("float32", 4, 1.5), "offset in bytes is an integer, not 1.5"),
        (("float32", (2, 1.5)), "shape is an integer, not 1.5"),
        (("float32", "4"), "shape is an integer, not '4'"),
        (("float33", 4), "'float33' is no dtype that NumPy knows; did you mean 'float32'"),
    ],
)
def test_a_view_that_makes_no_sense(buffer: Buffer, arguments: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        buffer.array(*arguments)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: lookup("CPU:0").allocate(1.5), "a Buffer's size in bytes"),  # type: ignore[arg-type]
        (lambda: devices.blas_threads("2"), "a host's number of replicas"),  # type: ignore[arg-type]
        (lambda: devices.limit_blas_threads(1.5), "BLAS's number of threads"),  # type: ignore[arg-type]
    ],
)
def test_a_number_that_is_none_is_named(call: Callable[[], object], what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} is an integer"):
        call()


@pytest.mark.parametrize("fields", [{"task": "1"}, {"index": 1.0}, {"job": 3}, {"replica": True}])
def test_a_names_fields_have_types(fields: dict[str, Any]) -> None:
    (field,) = fields
    with pytest.raises(DeviceError, match=f"a device's {field} is"):
        DeviceName(**fields)


def test_counts_may_be_numpys_integers() -> None:
    here = Inventory()
    here.set_logical("CPU", np.int64(2))  # type: ignore[arg-type]
    assert len(here.logical("CPU")) == 2
    try:
        options.set_intra_op_threads(np.int64(1))  # type: ignore[arg-type]
        assert options.current().intra_op_threads == 1
    finally:
        options.set_intra_op_threads(None)
