"""Layers one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from allreduce.errors import UsageError
from allreduce.nn.calls import check_made
from allreduce.nn.checks import inner_layers
from allreduce.nn.input import Input
from allreduce.nn.layer import Layer
from allreduce.nn.model import Model


class Sequential(Model):
    """A model that passes its input through a list of layers.

    Begun with `Input` it is built at once; otherwise at the first call, `fit` or `build`.

    Args:
        layers: In the order in which they are called.
        name: What its variables' paths begin with.
    """

    holds_layers: ClassVar[bool] = True

    def __init__(
        self,
        layers: Iterable[Layer] | None = None,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self._input: Input | None = None
        self._layers: list[Layer] = []
        self._growing = False  # whether the call in progress only makes the variables
        self._used = False  # whether traces of a step may exist, which later layers would miss
        if isinstance(layers, Layer):
            raise UsageError(
                f"Sequential takes a list of layers: [{type(layers).__name__}(…)], not one alone"
            )
        for layer in layers or ():
            self._append(layer)
        self._build_if_known()

    def add(self, layer: Layer) -> None:
        """Append a layer.

        Raises:
            UsageError: It is no layer, holds this model, or the model has been used already.
        """
        if self._used:
            raise UsageError(
                f"model {self.name!r} has been built, called or trained already; add its layers "
                "before that"
            )
        self._append(layer)
        self.built = False
        self._build_if_known()

    def _append(self, layer: Any) -> None:
        if isinstance(layer, Input):
            if self._layers or self._input:
                raise UsageError("Input stands first in a Sequential, and only once")
            self._input = layer
        elif isinstance(layer, Layer):
            check_made(layer)
            if layer is self or self in inner_layers(layer).values():
                raise UsageError(f"model {self.name!r} cannot be a layer of itself")
            self._layers.append(layer)
        else:
            hint = f"; make one: {layer.__name__}(…)" if isinstance(layer, type) else ""
            raise UsageError(f"Sequential takes layers, not {layer!r}{hint}")

    def _build_if_known(self) -> None:
        if self._input is not None and self._layers:
            sample = np.empty((0, *self._input.shape), self._input.sample_dtype)
            self._growing = True
            try:
                self._sketch(self.predict_step, sample)
            finally:
                self._growing = False

    def children(self) -> Iterator[tuple[str, Layer]]:
        for index, layer in enumerate(self._layers):
            yield str(index), layer

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not self._layers:
            raise UsageError(f"model {self.name!r} has no layers; add some")
        self._used = self._used or not self._growing
        if self._input is not None:
            inputs = self._input.call(inputs)
        for layer in self._layers:
            inputs = layer(inputs, training=training)
        return inputs

    def get_config(self) -> dict[str, Any]:
        taken = inspect.signature(type(self)).parameters
        if "layers" not in taken and not any(
            each.kind is each.VAR_KEYWORD for each in taken.values()
        ):
            return super().get_config()  # its constructor makes them
        listed = [self._input, *self._layers] if self._input else self._layers
        return super().get_config() | {"layers": [layer.describe() for layer in listed]}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Layer] | None = None
    ) -> Sequential:
        """Make the model that `get_config` described; `make` makes a layer of its description."""
        if make is None:
            raise UsageError("Sequential.from_config needs a function that makes layers")
        if cls is not Sequential and "layers" not in config:  # its constructor makes them
            return cls(**config)
        if not isinstance(config.get("layers"), list):
            raise UsageError(f'Sequential\'s config has no list "layers": {config}')
        layers = [make(each) for each in config["layers"]]
        return cls(**{**config, "layers": layers})
