"""Arrays of other libraries: lent to a collective without a copy, and answered in kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.comm.base import Array
from allreduce.errors import UsageError

_NUMBERS = (bool, int, float, complex)
_CPU = 1  # DLPack's kDLCPU


@dataclass(frozen=True)
class Lent:
    """A caller's array as NumPy sees it, and how a result becomes what the caller works with."""

    array: Array
    answer: Callable[[Array], Any]


def borrow(where: str, x: Any) -> Lent:
    """View a caller's array, or number, as a NumPy array that shares its memory.

    Args:
        where: Who is calling what, for errors.
        x: A NumPy array or scalar, a Python number, an array on the CPU of a library that speaks
            DLPack (PyTorch, JAX, ...), or anything with the buffer protocol, which is answered with
            NumPy arrays.

    Raises:
        UsageError: It is none of these, or lies on another device.
    """
    if isinstance(x, np.ndarray):
        return Lent(x, _same)
    if isinstance(x, np.generic):
        return Lent(np.asarray(x), lambda result: result if result.ndim else result[()])
    if type(x) in _NUMBERS:
        return _number(where, x)
    library = type(x).__module__.partition(".")[0]
    if library in _LIBRARIES:
        return _LIBRARIES[library](where, x)
    if hasattr(x, "__dlpack__"):
        _check_device(where, x)
        return Lent(np.from_dlpack(x), _by_namespace(x))
    if isinstance(x, bytearray | memoryview) or type(x).__module__ == "array":
        return Lent(np.asarray(memoryview(x)), _same)
    raise UsageError(
        f"{where} takes an array or a number, but got {type(x).__name__}; convert it with "
        "numpy.asarray"
    )


def _same(result: Array) -> Array:
    return result


def _number(where: str, x: bool | int | float | complex) -> Lent:
    try:
        array = np.asarray(x, np.int64 if type(x) is int else None)
    except OverflowError as error:
        raise UsageError(f"{where}: {x} does not fit into 64 bits") from error
    return Lent(array, lambda result: result if result.ndim else result.item())


def _check_device(where: str, x: Any) -> None:
    kind, index = x.__dlpack_device__()
    if kind != _CPU:
        raise UsageError(
            f"{where} takes arrays in the memory of the CPU, but this {type(x).__name__} lies on "
            f"device {int(index)} of DLPack's kind {int(kind)}; copy it to the CPU first"
        )


def _by_namespace(x: Any) -> Callable[[Array], Any]:
    find = getattr(x, "__array_namespace__", None)
    return _same if find is None else find().from_dlpack


def _torch(where: str, x: Any) -> Lent:
    """View a tensor; NumPy has no bfloat16 of its own, so that goes as 16 bits."""
    torch = importlib.import_module("torch")
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{where} takes an array or a number, but got {type(x).__name__}")
    _check_device(where, x)
    if x.dtype != torch.bfloat16:
        return Lent(x.detach().numpy(), torch.from_numpy)
    bfloat16 = importlib.import_module("ml_dtypes").bfloat16
    return Lent(
        x.detach().view(torch.int16).numpy().view(bfloat16),
        lambda result: torch.from_numpy(result.view(np.int16)).view(torch.bfloat16),
    )


def _jax(where: str, x: Any) -> Lent:
    """View a JAX array, which cannot be written."""
    _check_device(where, x)
    return Lent(np.asarray(x), importlib.import_module("jax.numpy").asarray)


# Libraries whose arrays need more than DLPack gives: its arrays come read-only, or lack a type.
_LIBRARIES: dict[str, Callable[[str, Any], Lent]] = {"torch": _torch, "jax": _jax, "jaxlib": _jax}
