"""Models as safetensors files: tensors by path, everything else as JSON in the metadata.

A file is written beside its place, made durable and renamed, so that readers see the old one or the
new one, and several ranks may write at once.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from allreduce.errors import UsageError
from allreduce.nn import registry, steps

if TYPE_CHECKING:
    from allreduce.nn.model import Model

FORMAT = "allreduce-model-1"
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


def save(model: Model, path: str | PathLike[str]) -> None:
    """Write a model with its architecture and its optimizer's state.

    Raises:
        UsageError: It does not take one array, so that it could not be made again from its samples'
            shape; or its description is no plain data.
    """
    if model.sample is None:
        raise UsageError(
            f"model {model.name!r} cannot be saved, because it was called with several arrays at "
            "once; save_weights can save it"
        )
    described: dict[str, Any] = {
        "model": registry.serialize(model),
        "sample": model.sample,
        "epochs_done": model.epochs_done,
        "steps": model.replicator.steps,
        "compiled": None,
    }
    tensors = _weights(model)
    if model.compiled is not None:
        described["compiled"] = model.compiled.describe()
        state = model.compiled.optimizer.state()
        described["iterations"] = int(state.pop("iterations"))
        paths = {variable.name: key for key, variable in model.named_variables().items()}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            if (
                name in paths
            ):  # else it is a variable's that the optimizer updates beside the model's
                tensors[f"{_OPTIMIZER}{paths[name]}/{slot}"] = value
    write(path, tensors, described)


def save_weights(model: Model, path: str | PathLike[str]) -> None:
    """Write a model's weights."""
    write(path, _weights(model), {})


def _weights(model: Model) -> dict[str, np.ndarray]:
    return {_WEIGHTS + key: variable.numpy() for key, variable in model.named_variables().items()}


def write(
    path: str | PathLike[str], tensors: Mapping[str, np.ndarray], described: Mapping[str, Any]
) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: The architecture is not plain data, or the folder does not exist.
    """
    path = Path(path)
    try:
        text = json.dumps(described)
    except TypeError as error:
        raise UsageError(
            f"the model cannot be saved: {error}; get_config has to return plain data"
        ) from None
    contents = to_bytes(dict(tensors), metadata={"format": FORMAT, "allreduce": text})
    if not path.parent.is_dir():
        raise UsageError(f"cannot save to {path}: there is no folder {path.parent}")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp lets nobody else read it
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("Umask:")[1].split()[0], 8)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file's tensors and its description.

    Raises:
        UsageError: It does not exist, is damaged, or was not written by `save`; names the file.
    """
    if not Path(path).is_file():
        raise UsageError(f"there is no saved model at {path}")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, struct.error) as error:
        raise UsageError(
            f"{path} is no readable model: it is truncated or of another format ({error})"
        ) from None
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a safetensors file, but not a model saved by this library: its format is "
            f"{metadata.get('format')!r} instead of {FORMAT!r}"
        )
    return tensors, json.loads(metadata["allreduce"])


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def load_weights(model: Model, path: str | PathLike[str]) -> None:
    """Read a model's weights; every variable's path and shape has to agree.

    Raises:
        UsageError: One differs; the message names it.
    """
    tensors, _ = read(path)
    _assign(model, _part(tensors, _WEIGHTS), path)


def _assign(model: Model, values: Mapping[str, np.ndarray], path: str | PathLike[str]) -> None:
    variables = model.named_variables()
    for key in [*variables, *values]:
        if key not in values:
            raise UsageError(f"{path} is of another architecture: it has no variable {key!r}")
        if key not in variables:
            raise UsageError(
                f"{path} is of another architecture: model {model.name!r} has no variable {key!r}"
            )
        if variables[key].shape != values[key].shape:
            raise UsageError(
                f"{path} is of another architecture: variable {key!r} has shape "
                f"{values[key].shape} there, but {variables[key].shape} in model {model.name!r}"
            )
    for key, variable in variables.items():
        variable.assign(values[key].astype(variable.dtype))


def load_model(path: str | PathLike[str], custom_objects: Mapping[str, Any] | None = None) -> Model:
    """Make the model that `Model.save` wrote, ready to go on training where it stopped.

    It belongs to the strategy's scope in which this is called; every rank calls it.

    Args:
        path: The file.
        custom_objects: Classes and functions of one's own by name: Model and Layer subclasses,
        losses,
            metrics, optimizers.

    Raises:
        UsageError: The file is missing, damaged or no whole model, or a class in it is unknown.
    """
    from allreduce.nn.model import Model

    tensors, described = read(path)
    if "model" not in described:
        raise UsageError(f"{path} has weights only; make the model and use model.load_weights")
    custom = dict(custom_objects or {})
    model = registry.deserialize(described["model"], custom)
    if not isinstance(model, Model):
        raise UsageError(f"{path} describes the layer {type(model).__name__}, not a model")
    model.build_for(*described["sample"])
    _assign(model, _part(tensors, _WEIGHTS), path)
    model.epochs_done = described["epochs_done"]
    if described["compiled"] is not None:
        model.compile(**steps.restore(described["compiled"], custom))
        state = {"iterations": np.asarray(described["iterations"], np.int64)}
        paths = {key: variable.name for key, variable in model.named_variables().items()}
        for key, value in _part(tensors, _OPTIMIZER).items():
            name, _, slot = key.rpartition("/")
            state[f"{paths[name]}/{slot}"] = value
        model.optimizer.load_state(state)
    model.replicator.steps = described["steps"]  # what dropout draws depends on it
    return model
