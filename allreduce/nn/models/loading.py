"""Models from the files that `Model.save` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from allreduce.errors import AllreduceError, UsageError
from allreduce.graph.replicate.owner import current_replicator
from allreduce.keywords import explain
from allreduce.nn.core import calls, keras_names
from allreduce.nn.models import freezing, registry, saving, steps
from allreduce.nn.models.model import Model
from allreduce.training import naming_rank

# Elements of a variable that a file may describe without having a tensor as large: a layer of one's
# own may make one that is not saved.
_ALWAYS_ALLOWED = 1 << 24


@explain(keras_names.OF_LOAD)
def load_model(path: str | PathLike[str], custom_objects: Mapping[str, Any] | None = None) -> Model:
    """Make the model that `Model.save` wrote, ready to go on training where it stopped.

    It belongs to the strategy's scope in which this is called; every rank calls it.

    Args:
        path: The file.
        custom_objects: Classes and functions of one's own by name: Model and Layer subclasses,
            losses, metrics, optimizers.

    Raises:
        UsageError: The file is missing, damaged or no whole model, or a class in it is unknown.
    """
    with naming_rank(current_replicator(), "load_model"):
        return _load(path, custom_objects)


def _load(path: str | PathLike[str], custom_objects: Mapping[str, Any] | None) -> Model:
    tensors, described = saving.read(path)
    if "model" not in described:
        raise UsageError(f"{path} has weights only; make the model and use model.load_weights")
    if not isinstance(custom_objects or {}, Mapping):
        raise UsageError(f"custom_objects is a dict of classes by name, not {custom_objects!r:.60}")
    custom = dict(custom_objects or {})
    largest = max([_ALWAYS_ALLOWED, *(value.size for value in tensors.values())])
    try:
        with calls.limited(largest):
            return _made(path, tensors, described, custom)
    except (AllreduceError, MemoryError):
        raise
    except Exception as error:
        if custom:  # it may be one of these that raises
            raise
        why = f"what it describes cannot be made ({type(error).__name__}: {error})"
        raise saving.damaged(path, why) from error


@contextmanager
def _naming(path: str | PathLike[str]) -> Iterator[None]:
    """Prefix errors of the block with the file."""
    try:
        yield
    except UsageError as error:
        error.args = (f"{path} cannot be loaded: {error}", *error.args[1:])
        raise


def _made(
    path: str | PathLike[str],
    tensors: Mapping[str, np.ndarray],
    described: Mapping[str, Any],
    custom: Mapping[str, Any],
) -> Model:
    with _naming(path):
        model = registry.deserialize(described["model"], custom)
    if not isinstance(model, Model):
        raise UsageError(f"{path} describes the layer {type(model).__name__}, not a model")
    with _naming(path):
        if described["sample"] is not None:  # else it builds itself
            model.build_for(*described["sample"])
    saving.assign(model, tensors, path)
    if "frozen" in described:  # older files have none
        freezing.restore(model, described["frozen"], path)
    model.epochs_done = int(described["epochs_done"])
    if described["compiled"] is not None:
        slots = saving.part(tensors, saving.OPTIMIZER)
        state = _state(model, slots, described["iterations"], path)
        with _naming(path):
            model.compile(**steps.restore(described["compiled"], custom))
            model.optimizer.load_state(state)
        # Dropout's draws depend on the number of runs of the step, which older files do not have.
        runs = described.get("steps", described["iterations"])
        model.replicator.set_steps(model.train_function, int(runs))
    return model


def _state(
    model: Model, slots: Mapping[str, np.ndarray], iterations: int, path: str | PathLike[str]
) -> dict[str, np.ndarray]:
    """Return the optimizer's state under the variables' names in this process."""
    state = {"iterations": np.asarray(iterations, np.int64)}
    names = {key: variable.name for key, variable in model.named_variables().items()}
    for key, value in slots.items():
        place, _, slot = key.rpartition("/")
        if place not in names:
            raise saving.damaged(path, f"there is no variable for the optimizer's {key!r}")
        state[f"{names[place]}/{slot}"] = value
    return state
