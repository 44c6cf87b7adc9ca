"""Encode graphs as protobuf messages, and decode them; nothing is pickled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import UnsupportedError, UsageError
from allreduce.graph.core import op_table
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.spec import Dim, Shape, Spec
from allreduce.graph.ops.array.slicing import Part
from allreduce.graph.ops.array.windows import Windows
from allreduce.graph.trace.printing import Printed
from allreduce.graph.trace.subgraph import Body
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import UpdateRule
from allreduce.optim import registry
from allreduce.server.protocol import task_pb2 as pb

# Dataclasses that attributes of nodes consist of.
_RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Body, Part, Printed, Windows)}


@dataclass(frozen=True, slots=True)
class Description:
    """A variable as a graph's message describes it."""

    name: str
    spec: Spec
    device: str
    trainable: bool

    @classmethod
    def of(cls, variable: Variable) -> Description:
        return cls(variable.name, variable.spec, str(variable.place), variable.trainable)


@dataclass(frozen=True, slots=True)
class Configuration:
    """An optimizer as a graph's message describes it: JSON, and the variables it changes."""

    config: str
    variables: tuple[Description, ...]


def encode(graph: Graph) -> pb.Graph:
    """Encode a graph, with the variables and optimizers that it uses.

    Raises:
        UsageError, UnsupportedError: An attribute of a node cannot be encoded; names the operator
            and the user's line.
    """
    encoder = _Encoder()
    message = encoder.graph(graph)
    message.variables.extend(_described(each) for each in encoder.variables)
    message.rules.extend(pb.Rule(config=sendable(each)) for each in encoder.rules)
    return message


def decode(
    message: pb.Graph,
    variable: Callable[[Description], Any] = lambda each: each,
    rule: Callable[[Configuration], Any] = lambda each: each,
) -> Graph:
    """Decode a graph.

    Args:
        message: What `encode` returned.
        variable: Returns this process's object for a variable; by default the description.
        rule: Returns this process's object for an optimizer; by default the configuration.

    Raises:
        UsageError: An operator is not registered in this process.
    """
    return _Decoder(message, variable, rule).graph(message)


def describe(message: pb.Variable) -> Description:
    """Read a variable's description."""
    spec = Spec(tuple(message.shape), np.dtype(message.dtype))
    return Description(message.name, spec, message.device, message.trainable)


def sizes(shape: Shape) -> list[pb.Size]:
    """Encode a shape."""
    return [
        pb.Size(size=each.factor, name=each.name) if isinstance(each, Dim) else pb.Size(size=each)
        for each in shape
    ]


def _shape(message: Sequence[pb.Size]) -> Shape:
    return tuple(Dim(each.name, each.size) if each.name else each.size for each in message)


def _described(variable: Variable | Description) -> pb.Variable:
    each = Description.of(variable) if isinstance(variable, Variable) else variable
    return pb.Variable(
        name=each.name,
        shape=each.spec.shape,  # type: ignore[arg-type]  # without named sizes
        dtype=each.spec.dtype.str,
        device=each.device,
        trainable=each.trainable,
    )


def configured(rule: UpdateRule | Configuration) -> str:
    """Describe an optimizer's class and settings as JSON.

    Raises:
        UsageError: A setting cannot be described.
    """
    if isinstance(rule, Configuration):
        return rule.config
    try:
        return json.dumps(registry.serialize(rule), sort_keys=True)  # type: ignore[arg-type]
    except (TypeError, UsageError) as error:
        raise UsageError(f"{type(rule).__name__} cannot be sent to another task: {error}") from None


def sendable(rule: UpdateRule | Configuration) -> str:
    """Describe an optimizer for another task, which must be able to make it of that.

    Raises:
        UsageError: A class, or a setting, is code of the user's own.
    """
    described = configured(rule)
    if not isinstance(rule, Configuration):
        try:
            registry.deserialize(json.loads(described), {})
        except UsageError as error:
            raise UsageError(
                f"{type(rule).__name__} cannot be sent to another task: its class, its schedule or "
                "its groups are code of your own, which tasks do not have; use what ar.optim has"
            ) from error
    return described


@dataclass(slots=True)
class _Encoder:
    variables: list[Variable | Description] = field(default_factory=list)
    rules: list[UpdateRule | Configuration] = field(default_factory=list)

    def graph(self, graph: Graph) -> pb.Graph:
        return pb.Graph(
            nodes=[self.node(each) for each in graph.nodes],
            inputs=graph.inputs,
            outputs=graph.outputs,
            effects=graph.effects,
        )

    def node(self, node: Node) -> pb.Node:
        try:
            attrs = {name: self.value(value) for name, value in node.attrs.items()}
        except UnsupportedError as error:
            raise UnsupportedError(f"{node.source}: operator {node.op!r}: {error}") from None
        return pb.Node(
            op=node.op,
            inputs=node.inputs,
            control=node.control,
            attrs=attrs,
            shape=sizes(node.spec.shape),
            dtype=node.spec.dtype.str,
            device="" if node.device is None else str(node.device),
            source=node.source,
            part=node.part,
            beside=0 if node.beside is None else node.beside + 1,
        )

    def value(self, value: Any) -> pb.Value:
        """Encode an attribute."""
        if isinstance(value, Variable | Description):
            return pb.Value(variable=_index(self.variables, value))
        if isinstance(value, UpdateRule | Configuration):
            return pb.Value(rule=_index(self.rules, value))
        if isinstance(value, Graph):
            return pb.Value(graph=self.graph(value))
        if type(value).__name__ in _RECORDS:
            return pb.Value(record=self.record(value))
        if isinstance(value, slice):
            return pb.Value(slice=self.items((value.start, value.stop, value.step)))
        if isinstance(value, tuple):
            return pb.Value(tuple=self.items(value))
        if isinstance(value, list):
            return pb.Value(list=self.items(value))
        if isinstance(value, Mapping):
            pairs = pb.Pairs(
                keys=[self.value(each) for each in value],
                values=[self.value(each) for each in value.values()],
            )
            return pb.Value(dict=pairs)
        return _plain(value)

    def items(self, values: Sequence[Any]) -> pb.Items:
        return pb.Items(items=[self.value(each) for each in values])

    def record(self, value: Any) -> pb.Record:
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        encoded = {name: self.value(each) for name, each in fields.items()}
        return pb.Record(kind=type(value).__name__, fields=encoded)


def _plain(value: Any) -> pb.Value:
    """Encode a value that contains no others."""
    if value is None:
        return pb.Value(none=True)
    if isinstance(value, bool | np.bool_):
        return pb.Value(truth=bool(value))
    if isinstance(value, int | np.integer):
        return pb.Value(integer=str(int(value)))
    if isinstance(value, float):
        return pb.Value(number=value)
    if isinstance(value, str):
        return pb.Value(text=value)
    if isinstance(value, bytes):
        return pb.Value(raw=value)
    if isinstance(value, np.dtype):
        return pb.Value(dtype=value.str)
    if isinstance(value, Dim):
        return pb.Value(size=pb.Size(size=value.factor, name=value.name))
    if isinstance(value, Spec):
        return pb.Value(spec=pb.Spec(shape=sizes(value.shape), dtype=value.dtype.str))
    if isinstance(value, DeviceName):
        return pb.Value(device=str(value))
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return pb.Value(
            array=pb.Array(dtype=array.dtype.str, shape=array.shape, data=array.tobytes())
        )
    raise UnsupportedError(
        f"an attribute is {type(value).__name__} {value!r:.60}, which cannot be sent to another "
        "task; use numbers, text, arrays, and tuples and dicts of them"
    )


def _index(known: list[Any], wanted: Any) -> int:
    """Return an object's position in a list, to which a new one is appended."""
    for index, each in enumerate(known):
        if each is wanted:
            return index
    known.append(wanted)
    return len(known) - 1


class _Decoder:
    def __init__(
        self,
        message: pb.Graph,
        variable: Callable[[Description], Any],
        rule: Callable[[Configuration], Any],
    ) -> None:
        self._described = [describe(each) for each in message.variables]
        self._variables = [variable(each) for each in self._described]
        self._rules = [each.config for each in message.rules]
        self._rule = rule

    def graph(self, message: pb.Graph) -> Graph:
        nodes = tuple(self.node(i, each) for i, each in enumerate(message.nodes))
        return Graph(nodes, tuple(message.inputs), tuple(message.outputs), tuple(message.effects))

    def node(self, id: int, message: pb.Node) -> Node:
        op_table.lookup(message.op)  # which raises the error of an unknown operator
        attrs = {name: self.value(value) for name, value in sorted(message.attrs.items())}
        if "rule" in attrs:  # an optimizer is known by its variables
            changed = message.attrs["variables"].tuple.items
            config = self._rules[message.attrs["rule"].rule]
            described = tuple(self._described[each.variable] for each in changed)
            attrs["rule"] = self._rule(Configuration(config, described))
        return Node(
            id=id,
            op=message.op,
            inputs=tuple(message.inputs),
            attrs=attrs,
            spec=Spec(_shape(message.shape), np.dtype(message.dtype)),
            device=DeviceName.parse(message.device) if message.device else None,
            control=tuple(message.control),
            source=message.source,
            beside=message.beside - 1 if message.beside else None,
            part=message.part,
        )

    def value(self, message: pb.Value) -> Any:
        kind = message.WhichOneof("content")
        assert kind is not None
        return self._READ[kind](self, getattr(message, kind))

    def record(self, message: pb.Record) -> Any:
        fields = {name: self.value(each) for name, each in message.fields.items()}
        return _RECORDS[message.kind](**fields)

    def items(self, message: pb.Items) -> tuple[Any, ...]:
        return tuple(self.value(each) for each in message.items)

    def pairs(self, message: pb.Pairs) -> dict[Any, Any]:
        keys, values = map(self.value, message.keys), map(self.value, message.values)
        return dict(zip(keys, values, strict=True))

    _READ: dict[str, Callable[[Any, Any], Any]] = {
        "none": lambda _, found: None,  # noqa: ARG005
        "truth": lambda _, found: found,
        "integer": lambda _, found: int(found),
        "number": lambda _, found: found,
        "text": lambda _, found: found,
        "raw": lambda _, found: found,
        "array": lambda _, found: np.frombuffer(found.data, found.dtype).reshape(found.shape),
        "tuple": items,
        "list": lambda self, found: list(self.items(found)),
        "dict": pairs,
        "dtype": lambda _, found: np.dtype(found),
        "size": lambda _, found: Dim(found.name, found.size),
        "spec": lambda _, found: Spec(_shape(found.shape), np.dtype(found.dtype)),
        "slice": lambda self, found: slice(*self.items(found)),
        "device": lambda _, found: DeviceName.parse(found),
        "variable": lambda self, found: self._variables[found],
        "rule": lambda self, found: self._rules[found],
        "record": record,
        "graph": graph,
    }
