"""`Functional`: a model made of the calls of layers on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core import pytree
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.nn.core.checks import inner_layers
from allreduce.nn.core.layer import Layer
from allreduce.nn.core.symbols import Symbol, calls_between, symbol_of
from allreduce.nn.layers.input import Input
from allreduce.nn.models.model import Model


class Functional(Model):
    """A model of inputs and outputs: `ar.nn.Model(inputs, outputs)` makes one.

        a = ar.nn.Input((4,), name="a")
        b = ar.nn.Input((2,), name="b")
        h = ar.nn.Concatenate()([ar.nn.Dense(8)(a), b])
        model = ar.nn.Model([a, b], {"price": ar.nn.Dense(1)(h), "kind": ar.nn.Dense(3)(h)})

    It is built at once. Layers may be called several times, and be parts of several models, which
    then share their variables.

    Args:
        inputs: An Input, or a list, tuple or dict of several.
        outputs: What layers gave: one, or a list, tuple or dict of several.
        name: The prefix of its layers' paths in files.

    Raises:
        UsageError: They are something else, or an output depends on another input.
    """

    holds_layers: ClassVar[bool] = True
    builds_itself: ClassVar[bool] = True

    def __init__(
        self,
        inputs: Any,
        outputs: Any,
        *,
        name: str | None = None,
        dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self._inputs, self._outputs = _symbols("inputs", inputs), _symbols("outputs", outputs)
        self._calls = calls_between(self.inputs, self.outputs)
        self._layers: list[Layer] = list(dict.fromkeys(call.layer for call in self._calls))
        self._stand_alone()
        self.built = True

    @property
    def inputs(self) -> list[Symbol]:
        """The inputs' symbols."""
        return list(pytree.leaves(self._inputs))

    @property
    def outputs(self) -> list[Symbol]:
        """The outputs' symbols."""
        return list(pytree.leaves(self._outputs))

    @property
    def input_names(self) -> list[str]:
        """The inputs' names, by which `fit` takes a dict of arrays."""
        return [symbol.name for symbol in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """The outputs' names in losses, metrics and histories: a dict's keys, or their layers'."""
        if isinstance(self._outputs, Mapping):
            return [str(key) for key in self._outputs]
        names = [symbol.name for symbol in self.outputs]
        return [
            f"{name}_{place}" if names.count(name) > 1 else name for place, name in enumerate(names)
        ]

    def children(self) -> Iterator[tuple[str, Layer]]:
        for index, layer in enumerate(self._layers):
            yield str(index), layer

    def call(self, inputs: Any, training: bool = False) -> Any:
        values = dict(zip(self.inputs, self._arranged(inputs), strict=True))
        for call in self._calls:
            mode = training if call.training is None else call.training
            given = pytree.map_leaves(values.__getitem__, call.inputs)
            made = pytree.leaves(call.layer(given, training=mode))
            values |= zip(pytree.leaves(call.outputs), made, strict=True)
        return pytree.map_leaves(values.__getitem__, self._outputs)

    def _arranged(self, inputs: Any) -> list[Any]:
        """Return the tensors in the order of the inputs, each checked against its Input."""
        names = self.input_names
        if isinstance(inputs, Mapping):
            keys = list(self._inputs) if isinstance(self._inputs, Mapping) else names
            if set(inputs) != set(keys):
                raise UsageError(
                    f"model {self.name!r} takes inputs called {', '.join(map(str, keys))}, not "
                    f"{', '.join(map(str, inputs))}"
                )
            if keys is names:
                inputs = [inputs[name] for name in names]
            else:  # in the order of the model's own dict
                inputs = self._inputs | dict(inputs)
        tensors = pytree.leaves(inputs)
        if len(tensors) != len(names):
            raise UsageError(
                f"model {self.name!r} takes {len(names)} inputs ({', '.join(names)}), not "
                f"{len(tensors)}"
            )
        for symbol, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.shape[1:] != symbol.spec.shape[1:]:
                raise ShapeError(
                    f"{users_line()}: input {symbol.name!r} of model {self.name!r} takes "
                    f"{show(symbol.spec.shape)}, but got {show(tensor.shape)}"
                )
        return tensors

    def describe(self) -> dict[str, Any]:
        seen: set[Layer] = set()
        for layer in self._layers:
            within = {layer, *inner_layers(layer).values()}
            if seen & within:
                raise UsageError(
                    f"model {self.name!r} cannot be saved: its layer {layer.name!r} shares a layer "
                    "with another one, which would come back as two; save its weights"
                )
            seen |= within
        return super().describe()

    def get_config(self) -> dict[str, Any]:
        places = {call.number: place for place, call in enumerate(self._calls)}

        def refer(symbol: Symbol) -> dict[str, list[int]]:
            if symbol in self.inputs:
                return {"of": [-1, self.inputs.index(symbol)]}
            assert symbol.call is not None, "calls_between has refused other inputs"
            leaves = pytree.leaves(symbol.call.outputs)
            return {"of": [places[symbol.call.number], leaves.index(symbol)]}

        return super().get_config() | {
            "layers": [layer.describe() for layer in self._layers],
            "given": [
                {"name": each.name, "shape": list(each.spec.shape[1:]), "dtype": each.dtype}
                for each in self.inputs
            ],
            "calls": [
                [self._layers.index(call.layer), _packed(refer, call.inputs), call.training]
                for call in self._calls
            ],
            "inputs": _packed(refer, self._inputs),
            "outputs": _packed(refer, self._outputs),
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Layer] | None = None
    ) -> Functional:
        """Make the model that `get_config` described; `make` makes a layer of its description."""
        if make is None:
            raise UsageError("Functional.from_config needs a function that makes layers")
        options = {key: config[key] for key in ("name", "dtype", "trainable") if key in config}
        layers = [make(each) for each in config["layers"]]
        inputs = [Input(**each).symbol for each in config["given"]]
        made: list[list[Symbol]] = []

        def find(place: Sequence[int]) -> Symbol:
            of, index = place
            return inputs[index] if of < 0 else made[of][index]

        for layer, given, training in config["calls"]:
            made.append(pytree.leaves(layers[layer](_unpacked(find, given), training)))
        parts = (_unpacked(find, config[key]) for key in ("inputs", "outputs"))
        return cls(*parts, **options)


Model.functional = Functional


def _symbols(what: str, given: Any) -> Any:
    def symbol(leaf: Any) -> Symbol:
        found = symbol_of(leaf)
        if found is None:
            raise UsageError(
                f"the {what} of a functional model are ar.nn.Input objects and what layers gave "
                f"for them, not {leaf!r:.60}"
            )
        if what == "inputs" and found.call is not None:
            raise UsageError(f"the inputs of a model are ar.nn.Input objects, not {found!r}")
        return found

    if not pytree.leaves(given):
        raise UsageError(f"a functional model needs {what}")
    return pytree.map_leaves(symbol, given)


def _packed(refer: Callable[[Symbol], Any], structure: Any) -> Any:
    """Describe a structure of symbols as plain data, where tuples and lists differ."""
    if isinstance(structure, Mapping):
        return {"dict": {key: _packed(refer, each) for key, each in structure.items()}}
    if isinstance(structure, tuple | list):
        kind = "tuple" if isinstance(structure, tuple) else "list"
        return {kind: [_packed(refer, each) for each in structure]}
    return refer(structure)


def _unpacked(find: Callable[[Sequence[int]], Symbol], packed: Mapping[str, Any]) -> Any:
    ((kind, value),) = packed.items()
    if kind == "of":
        return find(value)
    if kind == "dict":
        return {key: _unpacked(find, each) for key, each in value.items()}
    parts = [_unpacked(find, each) for each in value]
    return tuple(parts) if kind == "tuple" else parts
