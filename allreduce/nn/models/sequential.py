"""Layers one after the other."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import numpy as np

from allreduce import events
from allreduce.errors import UsageError
from allreduce.keywords import explain
from allreduce.nn.core.checks import inner_layers
from allreduce.nn.core.layer import Layer
from allreduce.nn.layers.input import Input
from allreduce.nn.models.model import Model


class Sequential(Model):
    """A model that passes its input through a list of layers.

    Begun with `Input` it is built at once; otherwise at the first call, `fit` or `build`.

    Args:
        layers: The layers, in the order of their calls.
        name: The prefix of its variables' paths.
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
        self._added_later = False  # whether it has layers that no constructor has made
        self._growing = False  # whether the call in progress only makes the variables
        self._used = False  # whether traces of a step may exist, which later layers would miss
        if isinstance(layers, Layer):
            raise UsageError(
                f"Sequential takes a list of layers: [{type(layers).__name__}(…)], not one alone"
            )
        if not isinstance(layers, Iterable | None):
            raise UsageError(f"Sequential takes a list of layers, not {layers!r:.60}")
        for layer in layers or ():
            self._append(layer)
        self._build_if_known()

    @explain()
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
        self._added_later = self._added_later or not _constructs(self)
        self.built = False
        self._build_if_known()

    def _append(self, layer: Any) -> None:
        if isinstance(layer, Input):
            if self._layers or self._input:
                raise UsageError("Input stands first in a Sequential, and only once")
            self._input = layer
        elif isinstance(layer, Layer):
            if layer is self or self in inner_layers(layer).values():
                raise UsageError(f"model {self.name!r} cannot be a layer of itself")
            self._layers.append(layer)
        else:
            hint = f"; make one: {layer.__name__}(…)" if isinstance(layer, type) else ""
            raise UsageError(f"Sequential takes layers, not {layer!r}{hint}")

    def _build_if_known(self) -> None:
        if self._input is not None and self._layers:
            sample = np.empty((0, *self._input.sizes), self._input.sample_dtype)
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
        if not self._lists_layers():
            return super().get_config()
        listed = self._listed()
        places = {layer: place for place, layer in reversed([*enumerate(listed)])}
        described = [
            layer.describe() | ({"as": places[layer]} if places[layer] < place else {})
            for place, layer in enumerate(listed)
        ]
        return super().get_config() | {"layers": described}

    def _lists_layers(self) -> bool:
        """Return whether its config has its layers; else its constructor makes them."""
        taken = inspect.signature(type(self)).parameters
        return "layers" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        if self._added_later and "layers" not in described["config"]:
            raise UsageError(
                f"{type(self).__name__} {self.name!r} cannot be saved: its constructor makes its "
                "layers, but others were added later; add them there, or have the constructor "
                "take layers and hand them on"
            )
        self._check_shared(set())
        return described

    def _check_shared(self, seen: set[Layer]) -> None:
        """Refuse a layer that would come back as two."""
        for layer in dict.fromkeys(self._layers) if self._lists_layers() else ():
            if layer in seen:
                raise UsageError(
                    f"{type(self).__name__} {self.name!r} cannot be saved: its layer "
                    f"{layer.path or layer.name!r} is in another Sequential, too, and would come "
                    "back as two; share layers in a Model of your own"
                )
            seen.add(layer)
            if isinstance(layer, Sequential):
                layer._check_shared(seen)

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
        layers: list[Layer] = []
        for each in config["layers"]:
            before = _made_before(each, layers)
            layers.append(make(each) if before is None else before)
        if "layers" in inspect.signature(cls).parameters:
            return cls(**{**config, "layers": layers})
        return cls._with_its_own(config, layers)

    @classmethod
    def _with_its_own(cls, config: Mapping[str, Any], layers: list[Layer]) -> Sequential:
        """Construct a model that takes layers as `**`, or makes its own and hands the rest on."""
        rest = {key: value for key, value in config.items() if key != "layers"}
        try:
            handed = cls(**rest, layers=layers)
            if len(handed._listed()) == len(layers):
                return handed
        except Exception as error:  # theirs to choose: it has them twice, or did not expect them
            events.logger.debug("%s makes its own layers: %r", cls.__name__, error)
            return cls(**rest)  # here, so that a second error shows the first one, too
        return cls(**rest)

    def _listed(self) -> list[Layer]:
        return [self._input, *self._layers] if self._input else self._layers


def _made_before(described: Any, layers: Sequence[Layer]) -> Layer | None:
    """Find the layer that stood in the model before and is meant by a description, if one is."""
    if not isinstance(described, Mapping) or "as" not in described:
        return None
    place = described["as"]
    if not isinstance(place, int) or not 0 <= place < len(layers):
        raise UsageError(f"the file is damaged: a layer is said to be that of place {place!r:.60}")
    return layers[place]


def _constructs(model: Sequential) -> bool:
    """Return whether the caller is inside a constructor of the model, still unfinished."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            first = frame.f_code.co_varnames[:1]
            if any(frame.f_locals.get(name) is model for name in first):
                return True
        frame = frame.f_back
    return False
