"""Build a model's variables by tracing a call for shapes; get, set, save and load their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from allreduce.devices.integers import integer
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.pytree import map_leaves
from allreduce.graph.core.spec import BATCH, Shape, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.trace import Trace, recording
from allreduce.keywords import explain
from allreduce.nn.core import checks
from allreduce.nn.core.layer import Layer
from allreduce.nn.models import saving
from allreduce.training import naming_rank


class Built(Layer):
    """A layer that can be built for a shape of samples before its first call, saved and restored.

    Attributes:
        sample: The shape and dtype of one sample; None if it was called with several arrays.
        predict_step: Computes outputs; one function for the model's life, so it is traced once.
    """

    # The class that Model(inputs, outputs) makes; set by its module, and of Model alone.
    functional: ClassVar[type[Built] | None] = None
    _asked_for: ClassVar[Callable[..., None] | None] = None  # the subclass's own `build`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.build not in (Built.build, cls._asked_for):  # its own, or that of a mixin
            own = cls.build

            # A user's `build` call runs Model's, whose first call then runs the subclass's own.
            @wraps(own)
            def build(self: Built, input_shape: Any, *others: Any, **named: Any) -> None:
                made = own if self._building else Built.build
                made(self, input_shape, *others, **named)

            cls.build = cls._asked_for = build  # type: ignore[method-assign]

    # Not where `__init__` of models is: `inspect.signature` would find this one.
    def __new__(cls, *given: Any, **named: Any) -> Any:
        makes = vars(cls).get("functional") if given or "inputs" in named else None
        return super().__new__(makes or cls)

    def __init__(
        self, *, name: str | None = None, dtype: str | None = None, trainable: bool = True
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.sample: tuple[Shape, str] | None = None
        self.predict_step = self._new_predict_step()
        self._building = False  # whether a subclass's `build` is running
        self._own_built = False  # whether it has run

    @explain()
    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return a layer directly inside the model, by its name or by its place in `layers`.

        Raises:
            UsageError: Not one layer has this name, or none this place; the message lists them.
        """
        if (name is None) == (index is None):
            raise UsageError("get_layer takes a layer's name or its index")
        layers = self.layers
        index = None if index is None else integer("index", index)
        if index is None:
            found = [layer for layer in layers if layer.name == name]
        else:
            found = layers[index:][:1] if -len(layers) <= index < len(layers) else []
        if len(found) == 1:
            return found[0]
        wanted = f"the name {name!r}" if index is None else f"index {index}"
        listed = ", ".join(f"{place} {layer.name!r}" for place, layer in enumerate(layers))
        raise UsageError(
            f"model {self.name!r} has {len(found) or 'no'} layers of {wanted}: there are "
            f"{listed or 'none yet'}; give layers different names, or pass index="
        )

    def _new_predict_step(self) -> Callable[[Any], Any]:
        """Make a function that lives as long as the model, so that it is traced once."""

        def predict_step(x: Any) -> Any:
            return self(x, training=False)

        predict_step.__qualname__ = f"{type(self).__name__}.predict_step"  # for messages
        return predict_step

    def _sketch(self, step: Callable[..., Any], *given: Any) -> checks.Lookups:
        """Trace a step for its shapes alone; the first time makes the variables.

        Args:
            given: Its arguments: structures of arrays.

        Returns:
            The embedding tables that take samples directly as indices.
        """
        trace = Trace()
        with recording(trace):

            def placeholder(array: np.ndarray | None) -> Any:
                if array is None:
                    return None
                return trace.placeholder(Spec((BATCH, *array.shape[1:]), array.dtype), "x")

            step(*map_leaves(placeholder, given))
        return checks.tables(trace)

    @explain()
    def build(self, input_shape: Any, dtype: str | None = None) -> None:
        """Make the variables for samples of a shape, `(None, features)` or `(batch, features)`.

        Args:
            input_shape: Of the inputs, with the batch.
            dtype: Of the inputs; the model's by default, an integer type for indices.
        """
        if self._building:  # called by a subclass's build, as in Keras
            return
        sizes = input_shape if isinstance(input_shape, list | tuple) else ()
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes[1:]):
            raise ShapeError(f"build takes (None, features, …), not {input_shape!r}")
        self.build_for(sizes[1:], dtype or self.dtype)

    def build_for(self, shape: Sequence[int], dtype: str) -> None:
        """Make the variables for samples of a shape, without the batch, and a dtype."""
        if not self.built:
            self._sketch(self.predict_step, np.empty((0, *shape), dtype))

    def _build_once(self, tensors: Any) -> None:
        """Record the shape of the samples; the call itself builds the layers that it reaches.

        Only a subclass with its own `build` makes variables here.
        """
        if type(self).build is not Built.build and not self._own_built:
            self._building = True
            try:
                super()._build_once(tensors)
            finally:
                self._building = False
            self.built, self._own_built = False, True
        if isinstance(tensors, Tensor) and all(isinstance(size, int) for size in tensors.shape[1:]):
            self.sample = (tensors.shape[1:], tensors.dtype.name)

    @explain()
    def get_weights(self) -> list[np.ndarray]:
        """Copy all variables' values, in the order of `variables`."""
        self._check_built("get_weights")
        return [variable.numpy() for variable in self.variables]

    @explain()
    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set all variables, or none; call it on every rank with equal values.

        Raises:
            UsageError, ShapeError: Their number, a shape or a dtype does not fit; the message names
                the variable.
        """
        self._check_built("set_weights")
        checks.assign_all(self, weights, "set_weights")

    @explain()
    def save_weights(self, path: str | PathLike[str]) -> None:
        """Write the variables' values into a safetensors file, otherwise as `save` does."""
        self._check_built("save_weights")
        with naming_rank(self.replicator, "save_weights"):
            saving.save_weights(path, self)

    @explain()
    def load_weights(self, path: str | PathLike[str]) -> None:
        """Read the variables' values from a file of `save_weights` or `save`, on every rank.

        Raises:
            UsageError: The file is damaged or of another model; the message names the variable.
        """
        self._check_built("load_weights")
        tensors, _ = saving.read(path)
        saving.assign(self, tensors, path)

    def _check_built(self, what: str) -> None:
        if not self.built:
            raise UsageError(
                f"{what}: model {self.name!r} has no variables yet; call model.build((None, "
                "features)), begin it with ar.nn.Input, or fit it first"
            )
