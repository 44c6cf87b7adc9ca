"""Call the CUDA driver; turn its status codes into errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as api

from allreduce.errors import InternalError, OutOfMemoryError, UnsupportedError

__all__ = ["CudaError", "api", "call"]

_SUCCESS = api.CUresult.CUDA_SUCCESS
_NO_MEMORY = api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NOT_READY = api.CUresult.CUDA_ERROR_NOT_READY
ALREADY_ENABLED = api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
UNKNOWN = api.CUresult.CUDA_ERROR_INVALID_VALUE  # of a pointer: no memory of CUDA
NOT_FOUND = api.CUresult.CUDA_ERROR_NOT_FOUND


class CudaError(InternalError):
    """A call of the driver failed.

    Attributes:
        status: Its status code.
    """

    status: Any = None


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the driver; returns its only result, or a tuple of several.

    Raises:
        OutOfMemoryError: The device has too little memory.
        CudaError: It failed otherwise, or an earlier call did and is reported late.
    """
    status, *found = function(*arguments)
    if status != _SUCCESS:
        raise failure(function.__name__, status)
    return found[0] if len(found) == 1 else tuple(found)


def failure(name: str, status: Any) -> CudaError | OutOfMemoryError:
    """Return the error for a status code."""
    if status == _NO_MEMORY:
        return OutOfMemoryError(f"{name} found too little memory")
    code = getattr(status, "name", str(status))
    _, text = api.cuGetErrorString(status)
    cause = text.decode() if isinstance(text, bytes) else code
    error = CudaError(
        f"{name} failed with {code}: {cause}. CUDA may report an earlier operation's failure here; "
        "ar.config.enable_sync_errors() reports each at its own instruction"
    )
    error.status = status
    return error


def missing_library(name: str, error: Exception) -> UnsupportedError:
    """Return the error for a library of NVIDIA that is not installed."""
    why = " ".join(str(error).split())
    return UnsupportedError(
        f"{name} is not installed: {why}; pip install 'allreduce[cuda12]' (or [cuda13])"
    )
