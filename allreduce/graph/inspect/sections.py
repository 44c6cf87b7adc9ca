"""Group a step's graph into sections, for pictures and summaries.

A section is one layer, or its gradient, on one device; or a bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import prod

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import GRADIENT, LOSS, Graph, Node
from allreduce.graph.core.spec import Spec
from allreduce.graph.partition.partition import ANYWHERE
from allreduce.graph.trace.subgraph import with_bodies

FORWARD, BACKWARD, UPDATE = range(3)
AFTER = "after "  # the prefix of a section between layers
# With more layers than this, inner layers count as their model.
_MOST = 10
_UNNAMED = (
    *("store_gradient", "store_count", "read", "placeholder", "scan_result"),
    *("feed", "snapshot", "fetch"),
)
_NAMES = {
    "all_reduce_bucket": "all-reduce",
    "gradient_norm": "norm of all gradients",
    "all_reduce_norm": "norm of all gradients",
    "update_bucket": "update",
    "sum_slices": "sums in slices",
    "update_slices": "all-reduce and update in slices",
    "reduce_scatter_bucket": "reduce-scatter",
    "update_own": "update of the own slice",
    "all_gather_bucket": "all-gather",
}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(slots=True)
class Section:
    """A group of nodes.

    Attributes:
        kind: FORWARD, BACKWARD or UPDATE.
        row: The index of the layer, in the order of calls.
    """

    device: DeviceName
    kind: int
    name: str
    row: int
    ops: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def does(self) -> str:
        """The operations, the most frequent first."""
        return ", ".join(op if n == 1 else f"{op} ×{n}" for op, n in self.ops.most_common())


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that is sent from one device to another."""

    source: Section
    readers: tuple[Section, ...]
    spec: Spec


@dataclass(slots=True)
class Sections:
    """A graph's sections.

    Attributes:
        all: All sections, in the order in which they start.
        edges: The sections whose values each section reads on its device.
    """

    all: list[Section]
    edges: list[tuple[Section, Section]]
    transfers: list[Transfer]

    @property
    def devices(self) -> list[DeviceName]:
        """The devices that have sections, in order."""
        return sorted({section.device for section in self.all}, key=str)


def sections(graph: Graph) -> Sections:
    """Group the nodes of a placed, bucketed and partitioned graph."""
    return _Grouping(graph).run()


class _Grouping:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._depth = _depth(graph)
        self._rows: dict[str, int] = {}
        self._between = "elsewhere"  # the name of code between two layers
        self._found: dict[Hashable, Section] = {}
        self._of: dict[int, Section] = {}
        self._edges: dict[tuple[int, int], tuple[Section, Section]] = {}
        self._readers: dict[int, list[Section]] = {}

    def run(self) -> Sections:
        nodes = self._graph.nodes
        for node in nodes:
            if node.op not in (*ANYWHERE, "receive", "send"):
                self._of[node.id] = section = self._section(node)
                section.ops.update(_op_names(node))
                section.notes += _notes(node)
                for inner in with_bodies([node]):
                    if inner is not node and inner.op not in (*ANYWHERE, "placeholder"):
                        repeated = self._repeated(inner, node)
                        repeated.ops.update(_op_names(inner))
                        self._link(repeated, section)
        for node in nodes:
            if node.id in self._of:
                for i in node.inputs:
                    self._join(nodes[i], self._of[node.id])
        for i in self._graph.outputs:
            if i in self._of:
                self._of[i].notes.append(f"returns {nodes[i].spec}")
        crossing = [self._transfer(nodes[i], readers) for i, readers in self._readers.items()]
        return Sections(list(self._found.values()), list(self._edges.values()), crossing)

    def _section(self, node: Node) -> Section:
        assert node.device is not None, node
        plan = node.attrs.get("plan")
        if plan is not None:
            return self._bucket(node)
        kind = BACKWARD if node.part.startswith(GRADIENT) else FORWARD
        name = "/".join(_layer(node.part).split("/")[: self._depth])
        if node.op in ("placeholder", "feed"):
            name = "inputs"
        elif not name and kind == FORWARD:
            latest = next(reversed(self._rows), "nothing")
            name = self._between = latest if latest == self._between else f"{AFTER}{latest}"
        elif not name:
            name = self._between
        row = self._rows.setdefault(name, len(self._rows))
        new = Section(node.device, kind, name, row)
        return self._found.setdefault((node.device, kind, name), new)

    def _repeated(self, inner: Node, scan: Node) -> Section:
        """Find the section of a scan's step: its layer's, or the scan's own."""
        part = inner.part
        if not _layer(part):
            return self._of[scan.id]
        if scan.part.startswith(GRADIENT) and not part.startswith(GRADIENT):  # computed again
            part = f"{GRADIENT}{part}"
        return self._section(replace(inner, part=part, device=scan.device))

    def _bucket(self, node: Node) -> Section:
        """Find the section of a bucket, or the one that a gradient is stored for."""
        plan, part = node.attrs["plan"], node.attrs.get("bucket")
        if part is None:
            span = node.attrs.get("span", plan.buckets[0].first)
            part = next(each for each in plan.buckets if each.first <= span < each.last)
        assert node.device is not None, node
        key = (id(plan), part.index)
        count = sum(1 for each in self._found.values() if each.kind == UPDATE)
        new = Section(node.device, UPDATE, f"bucket {count}", -1)
        return self._found.setdefault(key, new)

    def _join(self, source: Node, reader: Section) -> None:
        if source.op == "receive":
            readers = self._readers.setdefault(source.id, [])
            if reader not in readers:
                readers.append(reader)
        elif source.id in self._of:
            self._link(self._of[source.id], reader)

    def _link(self, source: Section, reader: Section) -> None:
        if source is not reader:
            self._edges.setdefault((id(source), id(reader)), (source, reader))

    def _transfer(self, receive: Node, readers: list[Section]) -> Transfer:
        nodes = self._graph.nodes
        while receive.op == "receive":  # from task to task, and on from there to a device
            (sent,) = receive.control
            made = nodes[sent].before[0]
            receive = nodes[made]
        return Transfer(self._of[receive.id], tuple(readers), receive.spec)


def _depth(graph: Graph) -> int:
    """Choose the depth of nested layers to distinguish."""
    paths = {_layer(node.part) for node in with_bodies(graph.nodes)}
    deepest = max(path.count("/") + 1 for path in paths)
    for depth in range(deepest, 1, -1):
        if len({tuple(path.split("/")[:depth]) for path in paths}) <= _MOST:
            return depth
    return 1


def _layer(part: str) -> str:
    """Name the layer that a part is, or is the gradient of; empty outside of layers."""
    return "" if part == LOSS else part.removeprefix(GRADIENT)


def _op_names(node: Node) -> list[str]:
    """Name a node's work for people."""
    if node.op in _UNNAMED:
        return []
    if "chain" in node.attrs:  # of several, joined
        return [str(node.attrs["chain"])]
    return [_NAMES.get(node.op, node.op)]


def _notes(node: Node) -> list[str]:
    if node.op == "placeholder":
        return [f"{node.attrs['name']}: {node.spec}"]
    if node.op not in ("update_bucket", "update_slices", "update_own"):
        return []
    part, layout = node.attrs["bucket"], node.attrs["plan"].layout
    count = part.last - part.first
    if not count:  # the header alone
        return []
    what = f"{count} variable{'' if count == 1 else 's'}"
    nbytes = (part.stop - part.start) * layout.dtype.itemsize
    return [f"{what}, {units(nbytes)}", type(node.attrs["rule"]).__name__]


def amount(spec: Spec) -> str:
    """Format the bytes of a tensor; per sample if it has rows."""
    known = prod(size for size in spec.shape if isinstance(size, int)) * spec.dtype.itemsize
    rows = [size for size in spec.shape if not isinstance(size, int)]
    each = units(known * prod(size.factor for size in rows))
    return " × ".join([each, *(size.name for size in rows)])


def units(nbytes: int) -> str:
    """Format a number of bytes."""
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
