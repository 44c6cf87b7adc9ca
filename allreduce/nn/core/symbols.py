"""Symbols: the calls of layers from which a functional model is made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

from allreduce.errors import UsageError
from allreduce.graph.core import pytree
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, Spec, show
from allreduce.graph.trace.trace import Trace, recording

_numbers = itertools.count()


class Symbol:
    """The output of a layer's call on symbols, or an input of a model; it has no value.

    Attributes:
        spec: Its shape, with the batch, and dtype.
        call: The call that gives it; None for an input.
        name: The name of an input, or of the layer.
    """

    def __init__(self, spec: Spec, call: Call | None, name: str) -> None:
        self.spec, self.call, self.name = spec, call, name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape, with None for the batch, as in Keras."""
        return tuple(None if isinstance(size, Dim) else size for size in self.spec.shape)

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return self.spec.dtype.name

    @property
    def symbol(self) -> Symbol:
        """Itself; an Input has one, too."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{users_line()}: {self!r} is part of a functional model and has no value: layers take "
            "it, such as ar.nn.Add and ar.nn.Concatenate; put operators into a layer of your own"
        )

    __array__ = __bool__ = __iter__ = __getitem__ = __float__ = __neg__ = __pow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return f"<symbol {self.name!r} {self.dtype} {show(self.spec.shape)}>"


class Call:
    """A call of a layer on symbols.

    Attributes:
        inputs: The structure of symbols that it was called on.
        training: As given to the call; None for the model's mode.
        outputs: The structure of symbols that it gave.
        number: Later calls have larger numbers.
    """

    def __init__(self, layer: Any, inputs: Any, training: bool | None) -> None:
        self.layer, self.inputs, self.training = layer, inputs, training
        self.number = next(_numbers)
        self.outputs: Any = None


def symbol_of(value: Any) -> Symbol | None:
    """Return the symbol that a value is, or that an Input has; None for anything else."""
    found = getattr(value, "symbol", None)
    return found if isinstance(found, Symbol) else None


def has_symbols(inputs: Any) -> bool:
    """Return whether a layer's inputs are symbols."""
    return any(symbol_of(leaf) is not None for leaf in pytree.leaves(inputs))


def record(layer: Any, inputs: Any, training: bool | None) -> Any:
    """Record a call on symbols; the layer is built by a trace for its shapes."""

    def symbol(leaf: Any) -> Symbol:
        found = symbol_of(leaf)
        if found is None:
            raise UsageError(
                f"{users_line()}: layer {layer.name!r} is called on symbols and on "
                f"{type(leaf).__name__}; a constant belongs into a layer of your own"
            )
        return found

    call = Call(layer, pytree.map_leaves(symbol, inputs), training)
    trace = Trace()
    with recording(trace):

        def placeholder(leaf: Symbol) -> Any:
            return trace.placeholder(leaf.spec, leaf.name)

        traced = layer(pytree.map_leaves(placeholder, call.inputs), training)
    call.outputs = pytree.map_leaves(
        lambda leaf: Symbol(Spec(leaf.shape, leaf.dtype), call, layer.name), traced
    )
    layer.output = call.outputs
    return call.outputs


def calls_between(inputs: list[Symbol], outputs: list[Symbol]) -> list[Call]:
    """List the calls that lead from inputs to outputs, in the order in which they were made."""
    found: dict[int, Call] = {}
    for symbol in _ancestors(outputs, set(inputs)):
        if symbol.call is not None:
            found[symbol.call.number] = symbol.call
        else:
            raise UsageError(
                f"the outputs of the model depend on the input {symbol!r}, which is not among its "
                f"inputs {inputs}"
            )
    return [found[number] for number in sorted(found)]


def _ancestors(outputs: list[Symbol], inputs: set[Symbol]) -> Iterator[Symbol]:
    """Go through the symbols that outputs depend on, without the inputs."""
    waiting, seen = list(outputs), set(inputs)
    while waiting:
        symbol = waiting.pop()
        if symbol not in seen:
            seen.add(symbol)
            yield symbol
            waiting.extend(pytree.leaves(symbol.call.inputs) if symbol.call else ())
