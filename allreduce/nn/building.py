"""How a model's variables are made: by a call that computes shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import ShapeError
from allreduce.graph.core.spec import BATCH, Shape, Spec
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.trace import Trace, recording
from allreduce.nn import checks
from allreduce.nn.weights import Weights


class Built(Weights):
    """A layer that is built for a shape of samples before it meets any.

    Attributes:
        sample: The shape of one, and its dtype; None where it was called with several arrays.
        predict_step: What computes outputs; one function for good, so that it is traced once.
    """

    _asked_for: ClassVar[Callable[..., None] | None] = None  # its `build`, where it has its own

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.build not in (Built.build, cls._asked_for):  # its own, or that of a mixin
            own = cls.build

            # Asked for by a person, `build` is Model's, which then comes here in the first call.
            @wraps(own)
            def build(self: Built, input_shape: Any, *others: Any, **named: Any) -> None:
                made = own if self._building else Built.build
                made(self, input_shape, *others, **named)

            cls.build = cls._asked_for = build  # type: ignore[method-assign]

    def __init__(
        self, *, name: str | None = None, dtype: str | None = None, trainable: bool = True
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.sample: tuple[Shape, str] | None = None
        self.predict_step = self._new_predict_step()
        self._building = False  # whether a subclass's `build` is at work
        self._own_built = False  # and whether it is done

    def _new_predict_step(self) -> Callable[[Any], Any]:
        """Make a function that is kept, so that it is traced once."""

        def predict_step(x: Any) -> Any:
            return self(x, training=False)

        predict_step.__qualname__ = f"{type(self).__name__}.predict_step"  # for messages
        return predict_step

    def _sketch(self, step: Callable[..., Any], *arrays: np.ndarray) -> Mapping[str, int]:
        """Trace a step for its shapes alone; the first time makes the variables.

        Returns:
            The tables in which samples are looked up as they are, and how many rows each has.
        """
        trace = Trace()
        with recording(trace):
            inputs = [
                trace.placeholder(Spec((BATCH, *array.shape[1:]), array.dtype), name)
                for array, name in zip(arrays, ("x", "y"), strict=False)
            ]
            step(*inputs)
        return checks.tables(trace)

    def build(self, input_shape: Any, dtype: str | None = None) -> None:
        """Make the variables for samples of a shape, `(None, features)` or `(batch, features)`.

        Args:
            input_shape: Of the inputs, with the batch.
            dtype: Of the inputs; the model's by default, an integer type for indices.
        """
        if self._building:  # a subclass's has called it, as those of Keras do
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
        """Note what for; the call itself builds the layers as it meets them.

        Only a subclass that has a `build` makes variables here.
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
