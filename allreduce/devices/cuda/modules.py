"""Compile the kernels' sources, load them on a device, and launch them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
import threading
from collections.abc import MutableMapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.devices.cuda.driver import NOT_FOUND, api, call, failure, missing_library
from allreduce.devices.cuda.streams import current_stream, rehearsal
from allreduce.errors import InternalError, UnsupportedError
from allreduce.events import logger

BLOCK = 256  # threads
_MOST_BLOCKS = 1 << 14  # kernels go on in strides of the whole grid

# Of an installed package, and of a clone.
_FOLDERS = (
    Path(__file__).parent / "sources" / "cuda",
    Path(__file__).parents[3] / "kernels" / "cuda",
)

_functions: dict[tuple[int, str, str], Any] = {}  # by device, source and name
_compiling = threading.Lock()
_loading: dict[int, threading.Lock] = {}  # by device


def launch(
    source: str,
    name: str,
    grid: int,
    signature: str,
    *values: Any,
    block: int = BLOCK,
    shared: int = 0,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        source: The file in `kernels/cuda`, without its ending.
        name: The kernel's.
        grid: The number of blocks.
        signature: The parameters' types, as `struct` has them: P for pointers.
        values: The parameters; pointers as integers.
        block: Threads in a block.
        shared: Bytes of dynamic shared memory.
    """
    stream = current_stream()
    function = _function(stream.device.card, source, name)
    if rehearsal():
        return
    packer, offsets = _parameters(signature)
    data = packer.pack(*values)
    at = ctypes.create_string_buffer(data, len(data))
    pointers = offsets + np.uint64(ctypes.addressof(at))
    call(
        *(api.cuLaunchKernel, function, grid, 1, 1, block, 1, 1, shared),
        *(stream.handle, pointers.ctypes.data, 0),
    )


def blocks(threads: int, block: int = BLOCK) -> int:
    """Return how many blocks a launch over so many elements has."""
    return max(1, min(-(-threads // block), _MOST_BLOCKS))


@cache
def _parameters(signature: str) -> tuple[struct.Struct, np.ndarray]:
    """Return what packs parameters, and the place of each; all are aligned to 8 bytes."""
    offsets, layout, at = [], "@", 0
    for each in signature.split():
        size = struct.calcsize(each)
        offsets.append(at)
        at += -(-size // 8) * 8
        layout += f"{each}{-size % 8}x"
    return struct.Struct(layout), np.asarray(offsets, np.uint64)


def _function(card: Any, source: str, name: str) -> Any:
    key = (card.ordinal, source, name)
    found = _functions.get(key)
    if found is None:
        # One lock for each GPU: loading waits for its work, and for collectives among that, which
        # other GPUs' threads may have to enqueue yet.
        with _loading.setdefault(card.ordinal, threading.Lock()):
            found = _functions[key] = _load(card, source, name)
    return found


def _load(card: Any, source: str, name: str) -> Any:
    module = _module(card, source)
    status, function = api.cuModuleGetFunction(module, name.encode())
    if status and status != NOT_FOUND:
        raise failure("cuModuleGetFunction", status)
    if status:
        raise UnsupportedError(
            f"GPUs have no kernel for these types (kernels/cuda/{source}.cu has no {name!r}): cast "
            'them, or place this operation on ar.device("CPU:0")'
        )
    with contextlib.suppress(RuntimeError):  # a driver before 12.4 loads it at its first launch
        call(api.cuFuncLoad, function)
    return function


_modules: dict[tuple[int, str], Any] = {}


def _module(card: Any, source: str) -> Any:
    key = (card.ordinal, source)
    if key not in _modules:
        card.enter()
        with _compiling:
            image = _compiled(source, card.architecture)
        _modules[key] = call(api.cuModuleLoadData, image)
    return _modules[key]


@cache
def _compiled(source: str, architecture: str) -> bytes:
    """Compile a source, or find it in the cache of an earlier process.

    Raises:
        InternalError: The compiler rejects it.
        UnsupportedError: There is no compiler.
    """
    from cuda.core import Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
    from cuda.pathfinder import DynamicLibNotFoundError

    folder = next((each for each in _FOLDERS if each.is_dir()), None)
    if folder is None:
        raise InternalError(f"the kernels' sources are missing; looked in {_FOLDERS}")
    text = (folder / f"{source}.cu").read_text()
    headers = b"".join(each.read_bytes() for each in sorted(folder.glob("*.cuh")))
    include = [str(folder), *_runtime_headers()]
    name = f"kernels/cuda/{source}.cu"  # with which the compiler's messages begin
    options = ProgramOptions(name=name, arch=architecture, std="c++17", include_path=include)
    digest = hashlib.sha256(headers).digest()
    key = make_program_cache_key(
        code=text, code_type="c++", options=options, target_type="cubin", extra_digest=digest
    )
    kept: MutableMapping[bytes, bytes] = {}
    try:
        kept = FileStreamProgramCache()
        found = kept.get(key)
    except OSError as error:
        _log_not_kept(error)
        found = None
    if found is None:
        try:
            found = bytes(Program(text, "c++", options).compile("cubin").code)
        except DynamicLibNotFoundError as error:
            raise missing_library("NVRTC", error) from None
        except Exception as error:
            raise InternalError(f"{name} does not compile for {architecture}: {error}") from error
        try:
            kept[key] = found
        except OSError as error:
            _log_not_kept(error)
    return found


_logged = threading.Event()  # set once the log says that compiled kernels cannot be kept


def _log_not_kept(error: OSError) -> None:
    if not _logged.is_set():
        _logged.set()
        logger.info(
            "kernels are compiled in each process, because their folder cannot be used: %s; "
            "XDG_CACHE_HOME names another one",
            error,
        )


def _runtime_headers() -> Sequence[str]:
    """Return the folders of CUDA's own headers."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    return [] if found is None else [str(found)]
