"""The graph of a step: print it and draw it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from allreduce.devices.names import DeviceName
from allreduce.errors import UsageError
from allreduce.graph.core.node import Graph
from allreduce.graph.inspect.drawing import draw
from allreduce.graph.inspect.sections import BACKWARD, Section, amount, sections


class StepGraph:
    """Each replica's graph of a step; `str` lists its nodes.

    Device names count the replica's own devices.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __str__(self) -> str:
        return str(self._graph)

    def __repr__(self) -> str:
        return f"<graph of {len(self._graph.nodes)} operations>"

    def summary(self) -> None:
        """Print the layers of each device, and the transfers between devices."""
        found = sections(self._graph)
        for device in found.devices:
            print(name_of(device, found.devices))
            own = [section for section in found.all if section.device == device]
            for section in sorted(own, key=lambda each: each.kind):
                print(f"  {_line(section)}")
        for transfer in found.transfers:
            source = transfer.source
            where = transfer.readers[0].device
            ends = (name_of(each, found.devices) for each in (source.device, where))
            what = f"{transfer.spec}, {amount(transfer.spec)}"
            print(f"{' -> '.join(ends)}: {what} of {title(source)}")

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw the graph as an SVG file: devices as columns, with layers, gradients and buckets.

        Raises:
            UsageError: `path` is no path, has another suffix, or its folder does not exist.
        """
        if not isinstance(path, str | PathLike):
            raise UsageError(f"a step's graph is drawn to a file; name one, not {path!r:.60}")
        file = Path(path)
        if file.suffix.lower() != ".svg":
            raise UsageError(
                f"a step's graph is drawn as SVG; call the file .svg, not {str(file)!r}"
            )
        if not file.parent.is_dir():
            raise UsageError(f"cannot draw to {file}: there is no folder {file.parent}")
        file.write_text(draw(sections(self._graph)), encoding="utf-8")


def _line(section: Section) -> str:
    details = "; ".join([*([section.does] if section.does else []), *section.notes])
    return f"{title(section):<40} {details}"


def title(section: Section) -> str:
    """Describe a section."""
    return f"gradient of {section.name}" if section.kind == BACKWARD else section.name


def name_of(device: DeviceName, among: list[DeviceName]) -> str:
    """Return the shortest unique name of a device."""
    several = len({(each.job, each.replica, each.task) for each in among}) > 1
    return str(device) if several else device.local
