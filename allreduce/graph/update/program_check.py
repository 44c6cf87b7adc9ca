"""Check the variables that a step changes, and that all ranks have the same step and variables.

`summary` describes a step for that: changes of variables, collectives, and their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.comm import Communicator, adopt, world
from allreduce.devices import read, write
from allreduce.errors import UsageError, everywhere, raised_here
from allreduce.graph.consistency.rank_check import Fact, Facts, check, hash_of
from allreduce.graph.core.naming import own_part
from allreduce.graph.core.node import Graph, Node
from allreduce.graph.core.op_table import lookup
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.ops.array.windows import Windows
from allreduce.graph.trace.subgraph import Body, results_read
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import LocalReplicas

_REMEDY = "make the same model, and use the same variables, on every rank"
_KNOWN_ROWS = "make the batches with strategy.distribute_dataset"
# Attributes that are integers and the same whatever arrays a rank brings; shapes, parts of them and
# counts of rows may be its own.
_PLACES = ("axis", "axes", "depth", "groups", "k", "key")

_OF_VARIABLES = ("read", "assign")

_SAME_FUNCTION = "run the same function on every rank"
_SAME_DRAWS = (
    f"{_SAME_FUNCTION}; random numbers depend on the seed and on the number of earlier draws: call "
    "ar.set_seed with one number on every rank, and draw as often on all"
)
_SAME_KINDS = f"{_SAME_FUNCTION}, with arrays of one dtype, and rows of one shape"


def name_of(fn: Callable[..., Any]) -> str:
    """Return a function's name."""
    return getattr(fn, "__qualname__", repr(fn))


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a step's function; arguments that do not fit its parameters are a mistake of its caller.

    Raises:
        UsageError: They do not fit.
    """
    try:
        return fn(*args, **kwargs)
    except TypeError as error:
        if raised_here(error):  # the function did not start
            raise UsageError(f"{users_line()}: {error}") from None
        raise


def check_owner(host: LocalReplicas, variables: Iterable[Variable]) -> None:
    """Raise an error if a variable does not belong to the replicas that run the step."""
    for variable in variables:
        owner: object = variable.replicator
        if owner is not host:
            another = "another " if repr(owner) == repr(host) else ""
            raise UsageError(
                f"variable {variable.name!r} was made for {owner!r}, but the step "
                f"runs on {another}{host!r}; make the model and the optimizer inside `with "
                "strategy.scope():` and run its steps with the same strategy"
            )


def check_equal(assign: Node, varying: Container[int]) -> None:
    """Raise an error if an assigned value differs between replicas.

    Args:
        assign: The assignment.
        varying: The nodes whose values differ between replicas.
    """
    if assign.inputs[0] in varying:
        raise UsageError(
            f"{assign.source}: variable {assign.attrs['variable'].name!r} would be assigned a "
            "value that depends on the replica's own samples, so that replicas would differ; "
            "return the value, reduce it with strategy.reduce, and assign the result"
        )


def check_once(update: Node, changed: set[Variable]) -> None:
    """Raise an error if an update changes a variable again; add its variables to `changed`."""
    again = changed.intersection(update.attrs["variables"])
    if again:
        raise UsageError(
            f"{update.source}: variable {min(v.name for v in again)!r} is updated twice in one "
            "step; add the losses up and minimize their sum, or make two steps"
        )
    changed.update(update.attrs["variables"])


def needs_all(fn: Callable[..., Any], what: str, replicas: int) -> UsageError:
    """Return the error for a step of several replicas that was called on one of them."""
    return UsageError(
        f"{name_of(fn)} {what} of {replicas} replicas; call it through strategy.run(...), so that "
        "all of them take part"
    )


class StepDigest:
    """The digest of a step that ranks compare in every run.

    Args:
        program: The facts of the step's program.
        joins_rows: Whether the step needs the number of rows of all replicas.
    """

    def __init__(self, program: Facts, joins_rows: bool) -> None:
        self.program = program
        self.joins_rows = joins_rows
        self.hash = hash_of(program)


def check_same(communicator: Communicator, rank: int, variables: Sequence[Variable]) -> None:
    """Compare the names, shapes and dtypes of variables in one collective.

    Args:
        communicator: The replicas' communicator; all members call this.
        rank: This process's rank, for messages.
        variables: The variables that the members are about to share, in order.

    Raises:
        MismatchError: They differ; the message names the first difference. On all members.
    """
    facts: dict[str, Fact] = {}
    for place, variable in enumerate(variables):
        kind = f"{variable.dtype.name} {show(variable.shape)}"
        compared = f"{own_part(variable.name)} {kind}"
        fact = Fact(f"{variable.name!r}, {kind},", _REMEDY, compared)
        facts[f"variable {place} of the step"] = fact
    check(communicator, rank, "the step's variables", facts)


def compare(host: LocalReplicas, step: StepDigest, knows_rows: bool) -> None:
    """Check that all ranks run the same program, in each run of a step without an optimizer.

    With an optimizer, `StepChecksum` does so. Without this check, exchanged values could be mixed
    up silently, and assigned variables could drift apart. The check is made in every run: a rank
    that has traced the step before may meet one that traces it now, for another shape.

    Args:
        host: This process's replicas.
        step: The step that they are about to run.
        knows_rows: Whether the number of rows of all replicas is known.

    Raises:
        MismatchError: Ranks have traced different programs, or only some know the number of rows.
        UsageError: No rank knows the number of rows, and the step needs it.
    """
    lacks, here = step.joins_rows and not knows_rows, world().rank

    def one(index: int) -> None:
        replica = host.replicas[index]
        assert replica.communicator is not None
        brought, digest = replica.rank_digest, step.hash.copy()
        digest.update(b"%d %d" % (brought.digest, lacks))

        def facts() -> Facts:
            rows = Fact("not known" if lacks else "known", _KNOWN_ROWS)
            joined = {"the number of rows of all replicas, which the step gathers,": rows}
            return {**step.program, **joined, **brought.facts()}

        check(replica.communicator, here, "the step", facts, digest.digest())

    host.on_replicas(one)
    if lacks:
        raise everywhere(
            UsageError(
                f"rank {here}: the step gathers the rows of all replicas, and how many there are "
                f"is not known on any rank; {_KNOWN_ROWS}"
            )
        )


def synchronize(host: LocalReplicas, variables: Sequence[Variable]) -> None:
    """Give every replica the values that replica 0 has, once per variable.

    Raises:
        MismatchError: Ranks have different variables.
    """
    fresh = [variable for variable in variables if variable not in host.shared]
    if host.num_replicas_in_sync > 1 and fresh:
        several_ranks = len(host.devices) < host.num_replicas_in_sync

        def receive(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None
            if several_ranks:  # replicas of one process have the same variables
                check_same(communicator, world().rank, fresh)
            for variable in fresh:
                place = variable.storage[index]
                value = place if type(place) is np.ndarray else read(place)
                adopt(communicator, f"the first value of {own_part(variable.name)}", value)
                if value is not place:
                    write(place, value)

        host.on_replicas(receive)
    host.shared.update(fresh)


def summary(graph: Graph) -> Facts:
    """List changes of variables, collectives, and their inputs, in the order of recording.

    Facts that may differ between ranks are left out: values of constants, shapes, devices, and
    further results.
    """
    lines = enumerate(_lines(graph, _numbers(graph, _shared(graph))))
    return {f"{name or f'operation {place}'} of the step": fact for place, (name, fact) in lines}


def compared_variables(graph: Graph) -> tuple[Variable, ...]:
    """List the variables that changes and collectives depend on, or change.

    They are the same on all ranks whose outlines are, and in the same order.
    """
    found: dict[Variable, None] = {}
    for i in _numbers(graph, _shared(graph)):
        attrs = graph.nodes[i].attrs
        own = [attrs["variable"]] if "variable" in attrs else attrs.get("variables", ())
        found.update(dict.fromkeys(own))
    return tuple(found)


def _shared(graph: Graph) -> Iterator[int]:
    """List the changes of variables, and the collectives."""
    for node in graph.nodes:
        if node.op in ("apply_gradients", "assign") or lookup(node.op).kind == "collective":
            yield node.id


def _numbers(graph: Graph, ends: Iterable[int]) -> dict[int, int]:
    """Number some nodes and all their inputs, in the order of their recording."""
    wanted = set(ends)
    for node in reversed(graph.nodes):
        if node.id in wanted:
            wanted.update(node.inputs)
    return {old: new for new, old in enumerate(sorted(wanted))}


def _lines(graph: Graph, numbers: dict[int, int]) -> Iterator[tuple[str, Fact]]:
    """Describe the numbered operations, and behind each scan its step; arguments have a name."""
    asked = results_read(graph.nodes[i] for i in numbers)
    for i in numbers:
        node = graph.nodes[i]
        yield _fact(node, _words(graph, node, numbers))
        if node.op == "scan":
            yield from _step(node, asked.get(i, set()))


def _fact(node: Node, words: str) -> tuple[str, Fact]:
    """Describe an operation, of which `words` are compared."""
    size, where = show(node.spec.shape), node.source
    if node.op == "placeholder":
        return node.attrs["name"], Fact(f"{node.spec.dtype} {size}", _SAME_KINDS, words)
    if node.op in _OF_VARIABLES:  # whose whole name may count the models of one process
        where = f"{node.attrs['variable'].name!r} at {where}"
    remedy = _SAME_DRAWS if "key" in node.attrs else _SAME_FUNCTION
    return "", Fact(f"{words} {size}", remedy, words, where)


def _step(scan: Node, asked: Collection[int]) -> Iterator[tuple[str, Fact]]:
    """Summarise a scan's step: the next carry, and the requested results."""
    body: Body = scan.attrs["body"]
    results = [*range(body.carries), *body.made]
    ends = {
        result: i
        for result, i in zip(results, body.graph.outputs, strict=True)
        if result < body.carries or result in asked
    }
    numbers = _numbers(body.graph, ends.values())
    yield from (("", fact) for _, fact in _lines(body.graph, numbers))
    given = ", ".join(f"{result}=%{numbers[i]}" for result, i in ends.items())
    yield "", Fact(f"the end of a step of scan({given})", _SAME_FUNCTION, where=scan.source)


def _words(graph: Graph, node: Node, numbers: dict[int, int]) -> str:
    reads = [f"%{numbers[i]}" for i in node.inputs]
    attrs = ((key, _without_sizes(value)) for key, value in sorted(node.attrs.items()))
    parts = [f"{key}={value!r}" for key, value in attrs if _is_shown(key, value)]
    if node.op in _OF_VARIABLES:
        parts = [repr(own_part(node.attrs["variable"].name))]
    elif node.op == "scan":
        parts = _of_scan(node.attrs["body"])
    elif node.op == "scan_result":
        parts = [_of_result(graph.nodes[node.inputs[0]].attrs["body"], node.attrs["index"])]
    return f"{node.op}({', '.join([*reads, *parts])}) {node.spec.dtype.name}"


def _of_scan(body: Body) -> list[str]:
    # A length that elements give is a part of their shapes, and so may be a rank's own.
    length = [] if body.elements else [f"length={body.length}"]
    return [*length, f"reverse={body.reverse}"]


def _of_result(body: Body, index: int) -> str:
    # The carries before each step are the last ones; how many there are in between is a rank's own.
    return f"index={index - len(body.specs) if index in body.kept else index}"


def _without_sizes(value: Any) -> Any:
    """Leave out paddings that follow from the sizes of images, which may differ between ranks."""
    if not isinstance(value, Windows):
        return value
    around = zip(value.strides, value.before, value.after, strict=True)
    padding = ["same" if value.same and each[0] > 1 else each[1:] for each in around]
    return f"{value.size} strides={value.strides} dilation={value.dilation} padding={padding}"


def _is_shown(key: str, value: Any) -> bool:
    return key in _PLACES or isinstance(value, str | bool | float)
