"""Draw a step's sections as an SVG picture.

Each device is a column with three lanes: layers from top to bottom, their gradients from bottom to
top, and the buckets that the gradients fill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from xml.sax.saxutils import escape

from allreduce.devices.names import DeviceName
from allreduce.graph.inspect.sections import (
    AFTER,
    BACKWARD,
    FORWARD,
    UPDATE,
    Section,
    Sections,
    Transfer,
    amount,
)

# In pixels.
WIDTH, HEIGHT = 210, 62  # of a section
GAP, RISE = 46, 30  # between lanes, between rows
MARGIN, TITLE = 34, 40  # around a device's lanes, above them
TITLE_INSET = 16  # of a device's name
LEGEND = 510  # the legend's end
APART = 110  # between devices: room for the labels of transfers
PADDING = 10  # on either side of a section's text
COLORS = {FORWARD: "#dbeafe", BACKWARD: "#ffedd5", UPDATE: "#dcfce7"}
EDGE, MOVED = "#64748b", "#be123c"
_CENTRED = ' text-anchor="middle"'
# Of texts: their size in pixels, and how much wider they are for being bold.
_FONTS = {"n": (13, 1.12), "s": (10.5, 1), "d": (16, 1.12), "t": (11, 1)}
_STYLE = (
    "text{font-family:sans-serif;fill:#0f172a}.n{font-size:13px;font-weight:600}"
    ".s{font-size:10.5px;fill:#475569}.d{font-size:16px;font-weight:600}"
    f".t{{font-size:11px;fill:{MOVED}}}"
)
# Widths of letters, in font sizes, in the widest of the usual fonts (DejaVu Sans).
_LETTERS = dict.fromkeys("fijlrt.,:;'|!()[]/-· ", 0.42) | dict.fromkeys("mwMW=×+→…", 1.0)
_CAPITAL, _OTHER = 0.72, 0.64


@dataclass(frozen=True, slots=True)
class Box:
    """The position of a section: its upper left corner."""

    x: float
    y: float
    lane: int
    row: int


def draw(found: Sections) -> str:
    """Return the picture, an SVG document."""
    boxes = _lay_out(found)
    columns = _columns(found)
    right = max(start + wide for start, wide in columns.values())
    width = max(right, LEGEND) + MARGIN
    bottom = max(box.y for box in boxes.values()) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 54:.0f}" '
        f'viewBox="0 0 {width:.0f} {bottom + 54:.0f}">',
        f"<style>{_STYLE}</style><defs>{_arrow_head('e', EDGE)}{_arrow_head('m', MOVED)}</defs>",
        f'<rect width="{width:.0f}" height="{bottom + 54:.0f}" fill="white"/>',
    ]
    for device, (x, wide) in columns.items():
        title = _text(x + TITLE_INSET, MARGIN + 26, "d", _name(device))
        parts.append(
            f'<rect x="{x}" y="{MARGIN}" width="{wide}" height="{bottom - MARGIN}" rx="12" '
            f'fill="#f8fafc" stroke="#cbd5e1"/>{title}'
        )
    curves, texts = _transfers(found.transfers, boxes)
    # Lines pass behind the boxes that they cross.
    parts += [*_edges(found, boxes), *curves]
    parts += [_section(section, boxes[id(section)]) for section in found.all]
    parts += texts
    parts += [*_legend(MARGIN, bottom + 34), "</svg>"]
    return "\n".join(parts)


def _name(device: DeviceName) -> str:
    return f"{device.local}  ({DeviceName(device.job, device.replica, device.task)})"


def _lanes(found: Sections, device: DeviceName) -> list[int]:
    """List the kinds of sections that a device has: its lanes from left to right."""
    return sorted({section.kind for section in found.all if section.device == device})


def _columns(found: Sections) -> dict[DeviceName, tuple[int, int]]:
    """Give each device's column its left edge and its width."""
    columns, x = {}, MARGIN
    for device in found.devices:
        lanes = len(_lanes(found, device))
        title = 2 * TITLE_INSET + ceil(extent(_name(device), "d"))
        wide = max(2 * MARGIN + lanes * WIDTH + (lanes - 1) * GAP, title)
        columns[device] = (x, wide)
        x += wide + APART
    return columns


def _lay_out(found: Sections) -> dict[int, Box]:
    """Give each section its place: rows are layers, on all devices alike."""
    columns = _columns(found)
    taken: set[tuple[DeviceName, int, int]] = set()
    boxes: dict[int, Box] = {}
    for section in sorted(found.all, key=lambda each: each.kind):
        row = section.row
        if section.kind == UPDATE:  # next to the first layer whose gradients it holds
            row = min((a.row for a, b in found.edges if b is section and a.row >= 0), default=0)
        lane = _lanes(found, section.device).index(section.kind)
        while (section.device, lane, row) in taken:
            row += 1
        taken.add((section.device, lane, row))
        x = columns[section.device][0] + MARGIN + lane * (WIDTH + GAP)
        y = MARGIN + TITLE + row * (HEIGHT + RISE)
        boxes[id(section)] = Box(x, y, lane, row)
    return boxes


def _section(section: Section, box: Box) -> str:
    mark, name = "∇ " if section.kind == BACKWARD else "", section.name
    lines = [section.does, *section.notes] if section.does else section.notes
    about = escape("\n".join([f"{mark}{name}", *lines]))
    shown = [lines[0], "; ".join(lines[1:])] if lines[1:] else _in_two_lines("".join(lines))
    return "".join(
        [
            f"<g><title>{about}</title>",
            f'<rect x="{box.x}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="8" '
            f'fill="{COLORS[section.kind]}" stroke="#94a3b8"/>',
            _text(box.x + PADDING, box.y + 20, "n", _short_name(mark, name)),
            *(
                _text(box.x + PADDING, box.y + 38 + 15 * i, "s", _short(line, "s"))
                for i, line in enumerate(shown)
            ),
            "</g>",
        ]
    )


def _edges(found: Sections, boxes: dict[int, Box]) -> Iterator[str]:
    for source, reader in found.edges:
        # Gradients also read values of other layers: these lines would cross the whole picture.
        again = source.kind == FORWARD and reader.kind == BACKWARD
        count = reader.kind == UPDATE and source.kind != BACKWARD
        if not (again and source.row != reader.row) and not count:
            yield _path(_curve(boxes[id(source)], boxes[id(reader)]), "e", EDGE)


def _curve(a: Box, b: Box) -> str:
    """Draw from one section of a device to another one."""
    if a.lane == b.lane and abs(a.row - b.row) == 1:
        down = b.row > a.row
        x, start, end = a.x + WIDTH / 2, a.y + HEIGHT * down, b.y + HEIGHT * (not down)
        return f"M{x},{start} L{x},{end}"
    if a.lane == b.lane:  # past others, on the left
        side = min(a.x, b.x) - 8 - 3 * min(abs(a.row - b.row), 6)
        return f"M{a.x},{a.y + HEIGHT / 2} C{side},{a.y} {side},{b.y} {b.x},{b.y + HEIGHT / 2}"
    right = b.x > a.x
    x, end = a.x + WIDTH * right, b.x + WIDTH * (not right)
    middle = (x + end) / 2
    y, to = a.y + HEIGHT / 2, b.y + HEIGHT / 2
    return f"M{x},{y} C{middle},{y} {middle},{to} {end},{to}"


def _transfers(transfers: list[Transfer], boxes: dict[int, Box]) -> tuple[list[str], list[str]]:
    """Draw transfers to other devices, to the first reader there, with their labels."""
    moved: dict[tuple[int, int], list[str]] = {}
    for transfer in transfers:
        ends = id(transfer.source), id(transfer.readers[0])
        moved.setdefault(ends, []).append(amount(transfer.spec))
    curves, texts = [], []
    for (source, reader), amounts in moved.items():
        a, b = boxes[source], boxes[reader]
        right = b.x > a.x
        x, end = a.x + WIDTH * right, b.x + WIDTH * (not right)
        y, to = a.y + HEIGHT * 0.3, b.y + HEIGHT * (0.7 if right else 0.3)
        lean = 60 if right else -60
        curve = f"M{x},{y} C{x + lean},{y} {end - lean},{to} {end},{to}"
        curves.append(_path(curve, "m", MOVED, ' stroke-dasharray="5 3"'))
        text = ", ".join(dict.fromkeys(amounts))
        middle, height, wide = (x + end) / 2, (y + to) / 2, extent(text, "t") + 4
        texts.append(
            f'<rect x="{middle - wide / 2}" y="{height - 8}" width="{wide}" height="15" '
            f'fill="white"/>{_text(middle, height + 4, "t", text, _CENTRED)}'
        )
    return curves, texts


def _legend(x: float, y: float) -> Iterator[str]:
    for kind, what in ((FORWARD, "layers"), (BACKWARD, "gradients"), (UPDATE, "buckets")):
        yield (
            f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{COLORS[kind]}" '
            f'stroke="#94a3b8"/>{_text(x + 20, y, "s", what)}'
        )
        x += 90
    yield _path(f"M{x},{y - 4} L{x + 34},{y - 4}", "m", MOVED, ' stroke-dasharray="5 3"')
    yield _text(x + 42, y, "s", "copied to another device")


def _arrow_head(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>'
    )


def _path(curve: str, tip: str, color: str, more: str = "") -> str:
    return (
        f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="1.4"{more} '
        f'marker-end="url(#{tip})"/>'
    )


def _text(x: float, y: float, kind: str, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}"{more}>{escape(text)}</text>'


def _short(text: str, kind: str) -> str:
    """Truncate a text that does not fit into a section."""
    if _fits(text, kind):
        return text
    while not _fits(f"{text}…", kind):
        text = text[:-1]
    return f"{text}…"


def _short_name(mark: str, name: str) -> str:
    """Write a layer's name; where it is long, its end says more than its model's name."""
    if _fits(f"{mark}{name}", "n"):
        return f"{mark}{name}"
    if name.startswith(AFTER):
        mark, name = f"{mark}{AFTER}", name.removeprefix(AFTER)
    while not _fits(f"{mark}…{name}", "n"):
        name = name[1:]
    return f"{mark}…{name}"


def _in_two_lines(line: str) -> list[str]:
    """Break a line that is too long, at a comma."""
    first, rest = line, ""
    while not _fits(first, "s") and ", " in first:
        first, _, last = first.rpartition(", ")
        rest = f"{last}, {rest}" if rest else last
    return [f"{first},", rest] if rest else [line]


def _fits(text: str, kind: str) -> bool:
    return extent(text, kind) <= WIDTH - 2 * PADDING


def extent(text: str, kind: str) -> float:
    """Estimate the width of a text in pixels."""
    size, bold = _FONTS[kind]
    ems = (_LETTERS.get(each, _CAPITAL if each.isupper() else _OTHER) for each in text)
    return size * bold * sum(ems)
