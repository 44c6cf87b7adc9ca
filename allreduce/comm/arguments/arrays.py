"""Borrow arrays of other libraries without a copy, and return results of the same kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from allreduce.comm.calls.call import Array
from allreduce.errors import UsageError

_NUMBERS = (bool, int, float, complex)
_CPU = 1  # DLPack's kDLCPU


class BorrowedArray(NamedTuple):
    """A NumPy view of a caller's array, and the conversion of a result to the caller's kind."""

    array: Array
    answer: Callable[[Array], Any]


def borrow(where: str, x: Any, takes: str = "takes an array or a number") -> BorrowedArray:
    """View a caller's array, or number, as a NumPy array that shares its memory.

    Args:
        where: The rank and the call, for errors.
        x: A NumPy array or scalar, a Python number, an array on the CPU of a library that speaks
            DLPack (PyTorch, JAX, ...), or anything with the buffer protocol, which is answered with
            NumPy arrays.
        takes: The expected kinds of arrays, for errors.

    Raises:
        UsageError: It is none of these, lies on another device, or is of a kind whose memory is not
            simply its values.
    """
    try:
        borrowed = _view(where, x)
    except UsageError:
        raise
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{where} cannot read this {type(x).__name__}: {error}; pass a plain copy of it, "
            "of a type that NumPy has"
        ) from error
    if borrowed is None:
        hint = "" if x is None else "; convert it with numpy.asarray"
        if isinstance(x, str | bytes | dict):
            hint = "; broadcast_object and all_gather_object take plain data"
        raise UsageError(f"{where} {takes}, but got {_named(x)}{hint}")
    return borrowed


def borrow_out(where: str, out: Any) -> Array:
    """View an array that a result goes to.

    Raises:
        UsageError: It is no array; a number is none.
    """
    takes = "must be an array"
    if isinstance(out, np.generic | int | float | complex):
        raise UsageError(f"{where} {takes}, but got {_named(out)}")
    return borrow(where, out, takes).array


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype whose `str` it is.

    Raises:
        TypeError: There is none, or it is bfloat16 and the package that has it is not there.
    """
    if name == "bfloat16":  # a type that NumPy knows only with this library
        try:
            import ml_dtypes
        except ModuleNotFoundError as error:
            raise TypeError(
                "NumPy has it by the package ml_dtypes: pip install ml_dtypes"
            ) from error
        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


def _view(where: str, x: Any) -> BorrowedArray | None:
    """Return None if it is neither an array nor a number."""
    if isinstance(x, np.ndarray):
        return _numpy(where, x)
    if isinstance(x, np.generic):
        return BorrowedArray(np.asarray(x), lambda result: result if result.ndim else result[()])
    if type(x) in _NUMBERS:
        return _number(where, x)
    for kind in type(x).__mro__:  # a subclass may be the caller's own
        library = kind.__module__.partition(".")[0]
        if library in _LIBRARIES:
            return _LIBRARIES[library](where, x)
    if hasattr(x, "__dlpack__"):
        _check_device(where, x)
        return BorrowedArray(np.from_dlpack(x), _by_namespace(x))
    try:
        memory = memoryview(x)
    except TypeError:
        return None
    return BorrowedArray(np.asarray(memory), _same)


def _numpy(where: str, x: Array) -> BorrowedArray:
    """View an array, of a subclass as a plain one: its memory is not the values of a masked one."""
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(
            f"{where} got a masked array, whose mask would be lost; fill it first, as by filled()"
        )
    return BorrowedArray(np.asarray(x), _same)


def _named(x: Any) -> str:
    return "None" if x is None else type(x).__name__


def _same(result: Array) -> Array:
    return result


def _number(where: str, x: bool | int | float | complex) -> BorrowedArray:
    try:
        array = np.asarray(x, np.int64 if type(x) is int else None)
    except OverflowError as error:
        raise UsageError(f"{where}: {x} does not fit into 64 bits") from error
    return BorrowedArray(array, lambda result: result if result.ndim else result.item())


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


def _torch(where: str, x: Any) -> BorrowedArray | None:
    """View a tensor; bfloat16, which NumPy lacks, as 16-bit integers."""
    torch = importlib.import_module("torch")
    if not isinstance(x, torch.Tensor):
        return None
    if x.device.type != "meta":  # which has no DLPack device
        _check_device(where, x)
    if x.dtype != torch.bfloat16:
        return BorrowedArray(x.detach().numpy(), torch.from_numpy)
    try:
        bfloat16 = dtype_named("bfloat16")
    except TypeError as error:
        raise UsageError(f"{where} got a tensor of bfloat16: {error}") from error
    return BorrowedArray(
        x.detach().view(torch.int16).numpy().view(bfloat16),
        lambda result: torch.from_numpy(result.view(np.int16)).view(torch.bfloat16),
    )


def _jax(where: str, x: Any) -> BorrowedArray | None:
    """View a JAX array, which cannot be written."""
    jax = importlib.import_module("jax")
    if isinstance(x, jax.core.Tracer):
        raise UsageError(
            f"{where} is called while JAX traces a function, where arrays have no values; call it "
            "outside jax.jit and the like"
        )
    if not isinstance(x, jax.Array):
        return None
    _check_device(where, x)
    return BorrowedArray(np.asarray(x), importlib.import_module("jax.numpy").asarray)


# Libraries whose arrays need more than DLPack gives: its arrays come read-only, or lack a type.
_LIBRARIES: dict[str, Callable[[str, Any], BorrowedArray | None]] = {
    "torch": _torch,
    "jax": _jax,
    "jaxlib": _jax,
}
