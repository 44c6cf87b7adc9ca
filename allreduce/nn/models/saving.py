"""Models as safetensors files: tensors by path, everything else as JSON in the metadata.

Readers see the old file or the new one, and several ranks may write at once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save as to_bytes

from allreduce import files
from allreduce.errors import UsageError
from allreduce.events import logger
from allreduce.nn.core.checks import assign_all
from allreduce.nn.core.layer import Layer
from allreduce.optim import Optimizer

FORMAT = "allreduce-model-1"
_OTHER_FORMATS = frozenset((".keras", ".h5", ".hdf5", ".pt", ".pth", ".npz", ".onnx"))
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


def save(
    path: str | PathLike[str],
    model: Layer,
    described: Mapping[str, Any],
    optimizer: Optimizer | None,
) -> None:
    """Write a model's weights, its description, and its optimizer's slots."""
    tensors = _weights(model)
    if optimizer is not None:
        state = optimizer.state()
        described = {**described, "iterations": int(state.pop("iterations"))}
        paths = {variable.name: key for key, variable in model.named_variables().items()}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            if name in paths:  # else it belongs to another model's variable
                tensors[f"{OPTIMIZER}{paths[name]}/{slot}"] = value
    write(path, tensors, described)


def save_weights(path: str | PathLike[str], model: Layer) -> None:
    """Write a model's weights."""
    write(path, _weights(model), {})


def _weights(model: Layer) -> dict[str, np.ndarray]:
    return {WEIGHTS + key: variable.numpy() for key, variable in model.named_variables().items()}


def write(
    path: str | PathLike[str], tensors: Mapping[str, np.ndarray], described: Mapping[str, Any]
) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: The architecture is not plain data, or the system does not take the file; then
            an old one is as it was.
    """
    path = checked("save to", path)
    if path.suffix.lower() in _OTHER_FORMATS:
        _warn_of_format(path.suffix)
    try:
        text = json.dumps(described)
    except TypeError as error:
        raise UsageError(
            f"the model cannot be saved: {error}; get_config has to return plain data"
        ) from None
    metadata = {"format": FORMAT, "allreduce": text, "crc32": _checksum(tensors, text)}
    contents = to_bytes(dict(tensors), metadata=metadata)
    try:
        _check_place(path)
        files.replace(path, contents)
    except OSError as error:  # its own text names a file that is gone again
        raise UsageError(f"cannot save to {path}: {files.refusal(error)}") from None


@functools.cache  # once
def _warn_of_format(suffix: str) -> None:
    logger.warning(
        "models are saved as safetensors, also under a name that ends with %s: ar.nn.load_model "
        "reads it, other libraries may not",
        suffix,
    )


def _checksum(tensors: Mapping[str, np.ndarray], text: str) -> str:
    """Compute a checksum of a file's contents, independent of their layout; some GB per second."""
    state = crc32(text.encode())
    for key in sorted(tensors):
        value = tensors[key]
        state = crc32(repr((key, value.dtype.name, value.shape)).encode(), state)
        state = crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, state)
    return f"{state:08x}"


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"cannot save to {path}: it is a folder; name a file in it")
    if path.exists() and not path.is_file():  # renaming would replace it
        raise UsageError(f"cannot save to {path}: it is a device, a pipe or a socket, and no file")
    if not path.parent.is_dir():
        raise UsageError(f"cannot save to {path}: there is no folder {path.parent}")


def checked(what: str, path: Any) -> Path:
    """Read a path; refuse what is none."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise UsageError(f"cannot {what} {path!r:.60}: a path is text, or a pathlib.Path") from None
    if not text:  # which a Path would take for the folder one is in
        raise UsageError(f"cannot {what} {path!r}: the path is empty; name a file")
    if "\0" in text:
        raise UsageError(f"cannot {what} {path!r}: the path has a null byte; name a file")
    return Path(text)


def read(path: str | PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file's tensors and its description."""
    try:
        is_there = checked("load", path).is_file()
    except OSError as error:
        raise UsageError(f"cannot load {path}: {error.strerror}") from None
    if not is_there:
        raise UsageError(f"there is no saved model at {path}")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except MemoryError:
        raise
    except Exception as error:  # errors that safetensors misses are raised by NumPy
        raise UsageError(
            f"{path} is no readable model: it is truncated or of another format ({error})"
        ) from None
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a safetensors file, but not a model saved by this library: its format is "
            f"{metadata.get('format')!r} instead of {FORMAT!r}"
        )
    text = metadata.get("allreduce", "")
    found, expected = _checksum(tensors, text), metadata.get("crc32")
    if expected not in (found, None):  # older files have none
        raise damaged(
            path,
            f"the checksum of its tensors and its description is {found}, but {expected} was saved "
            "with them (a tool that changes them on purpose drops crc32 from the metadata)",
        )
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its description is no JSON: {error}") from None
    if not isinstance(described, dict):
        raise damaged(path, f"its description is {described!r:.60}")
    return tensors, described


def damaged(path: str | PathLike[str], why: str) -> UsageError:
    """Build the error for a file that was written by `save` but has been changed since."""
    return UsageError(f"{path} is damaged: {why}; save the model again, or fetch the file anew")


def part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Pick the tensors of one kind, without their prefix."""
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def assign(model: Layer, tensors: Mapping[str, np.ndarray], path: str | PathLike[str]) -> None:
    """Set a model's variables to a file's; every variable's path and shape must agree."""
    values, variables = part(tensors, WEIGHTS), model.named_variables()
    other = f"{path} is of another architecture"
    for key in [*variables, *values]:
        if key not in values:
            raise UsageError(f"{other}: it has no variable {key!r}")
        if key not in variables:
            raise UsageError(f"{other}: model {model.name!r} has no variable {key!r}")
    assign_all(model, [values[key] for key in variables], other)
