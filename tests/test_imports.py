"""The order of rooms: each imports only lower ones, not its siblings, and nothing in circles.

Read from the sources, so that an import inside a function, under TYPE_CHECKING or written as a
registry's text ("allreduce.devices.cpu:CpuRuntime") counts as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Lowest first; those on one level are siblings. docs and design name the same order.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "importing", "openblas"),
    ("settings", "events"),
    ("_native",),
    ("devices", "cluster"),
    ("comm",),
    ("reduction",),
    ("graph",),
    ("optim", "data"),
    ("training",),
    ("nn",),
    ("strategies",),
    ("observe",),
    ("config", "run"),
    ("__init__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}

# Where packages are read from: (folder in the repository, what it is imported as).
SOURCES = (("allreduce", "allreduce"), ("strategies", "allreduce.strategies"))

_REGISTRY_TEXT = re.compile(r"allreduce(\.\w+)+(:\w+)?")


@dataclass(frozen=True)
class Import:
    """One module that another one names, and where."""

    importer: str
    imported: str
    place: str  # "allreduce/comm/calls/call.py:12"
    at_load: bool  # executed when the importer is loaded


def modules(root: Path) -> dict[str, Path]:
    """Map each module's dotted name to its file."""
    found = {}
    for folder, package in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join((package, *parts))] = path
    return found


def imports(root: Path, known: dict[str, Path]) -> list[Import]:
    """List everything that the modules in `known` import of this project."""
    found = []
    for module, path in known.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        for node, at_load in _naming(path.read_text()):
            for name in _named(node, package, known):
                place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}"
                found.append(Import(module, name, place, at_load))
    return found


@cache
def _naming(source: str) -> list[tuple[ast.AST, bool]]:
    """Give the nodes that may name modules: several tests read the same sources."""
    kinds = ast.Import | ast.ImportFrom | ast.Constant
    return [
        (node, at_load)
        for node, at_load in _walk(ast.parse(source), True)
        if isinstance(node, kinds)
    ]


def _walk(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Give every node, and whether it runs when its module is loaded."""
    yield node, at_load
    for child in ast.iter_child_nodes(node):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = (
            isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
            and child in node.body
        )
        yield from _walk(child, at_load and not lazy and not typing_only)


def _named(node: ast.AST, package: str, known: dict[str, Path]) -> list[str]:
    """Give the project's modules that a node names, registry texts included."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            names.append(whole if whole in known or whole == "allreduce._native" else base)
    elif isinstance(node, ast.Constant) and _REGISTRY_TEXT.fullmatch(str(node.value)):
        names = [name for name in [str(node.value).partition(":")[0]] if name in known]
    return [name for name in names if name.split(".")[0] == "allreduce"]


def room(module: str) -> str:
    """Give the room of a dotted name; the package itself is the room `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def broken_rules(root: Path) -> list[str]:
    """Describe each import that the order of rooms forbids, and each room that it does not know."""
    known = modules(root)
    complaints = [
        f"{path.relative_to(root)}: room {room(module)!r} has no place in LEVELS"
        for module, path in known.items()
        if room(module) not in HEIGHT
    ]
    for each in imports(root, known):
        here, there = room(each.importer), room(each.imported)
        if here == there or here not in HEIGHT:
            continue
        if there not in HEIGHT:
            complaints.append(f"{each.place} imports {each.imported}: no such room")
        elif HEIGHT[there] >= HEIGHT[here]:
            relation = "beside" if HEIGHT[there] == HEIGHT[here] else "above"
            complaints.append(f"{each.place} imports {each.imported}, which is {relation} {here!r}")
    return complaints


def cycles(root: Path) -> list[str]:
    """Describe the circles among modules of one room, through what runs when they are loaded."""
    known = modules(root)
    edges: dict[str, dict[str, str]] = {module: {} for module in known}
    for each in imports(root, known):
        inside = each.imported in known and room(each.imported) == room(each.importer)
        if each.at_load and inside and each.imported != each.importer:
            edges[each.importer].setdefault(each.imported, each.place)
    found: list[str] = []
    state: dict[str, str] = {}

    def visit(module: str, path: list[str]) -> None:
        state[module] = "open"
        for target, place in edges[module].items():
            if state.get(target) == "open":
                circle = [*path[path.index(target) :], target]
                found.append(f"{' -> '.join(circle)} (closed at {place})")
            elif target not in state:
                visit(target, [*path, target])
        state[module] = "done"

    for module in known:
        if module not in state:
            visit(module, [module])
    return found


def test_rooms_import_only_lower_ones() -> None:
    assert not broken_rules(REPOSITORY), "\n".join(["", *broken_rules(REPOSITORY)])


def test_modules_of_a_room_do_not_import_in_circles() -> None:
    assert not cycles(REPOSITORY), "\n".join(["", *cycles(REPOSITORY)])


def test_the_rooms_are_there_to_be_read() -> None:
    rooms = {room(module) for module in modules(REPOSITORY)}
    assert rooms >= {"errors", "devices", "cluster", "comm", "graph", "strategies", "__init__"}
    assert len(imports(REPOSITORY, modules(REPOSITORY))) > 50


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import allreduce.nn", "comm/x.py:1 imports allreduce.nn, which is above 'comm'"),
        ("from allreduce import graph", "imports allreduce.graph, which is above"),
        ("from allreduce.graph import Op", "imports allreduce.graph, which is above"),
        ("from ..graph import Op", "imports allreduce.graph, which is above"),
        ("from .. import graph", "imports allreduce.graph, which is above"),
        ("import allreduce as ar", "imports allreduce, which is above"),
        ("from allreduce import set_seed", "imports allreduce, which is above"),
        ("def f():\n    import allreduce.nn", "comm/x.py:2 imports allreduce.nn, which is above"),
        ("if TYPE_CHECKING:\n    from allreduce.nn import Model", "comm/x.py:2 imports"),
        ('ROWS = {"nn": "allreduce.nn:Dense"}', "imports allreduce.nn, which is above"),
        ("import allreduce.plumbing", "imports allreduce.plumbing: no such room"),
        ("from allreduce.strategies import Mirrored", "imports allreduce.strategies, which is"),
    ],
)
def test_forbidden_imports_are_found(tmp_path: Path, source: str, complaint: str) -> None:
    _write(tmp_path, "allreduce/comm/x.py", source)
    _write(tmp_path, "allreduce/graph/__init__.py", "")
    _write(tmp_path, "allreduce/nn/__init__.py", "")
    (found,) = broken_rules(tmp_path)
    assert complaint in found


def test_siblings_and_unknown_rooms_are_found(tmp_path: Path) -> None:
    _write(tmp_path, "allreduce/devices/x.py", "import allreduce.cluster\nimport allreduce.errors")
    _write(tmp_path, "allreduce/cluster/__init__.py", "from allreduce import _native, events")
    _write(tmp_path, "allreduce/events.py", "")
    _write(tmp_path, "allreduce/attic/x.py", "import allreduce.nn")
    attic, sibling = broken_rules(tmp_path)
    assert "room 'attic' has no place in LEVELS" in attic
    assert "devices/x.py:1 imports allreduce.cluster, which is beside 'devices'" in sibling


def test_circles_are_found(tmp_path: Path) -> None:
    _write(tmp_path, "allreduce/comm/a.py", "from allreduce.comm.b import B")
    _write(tmp_path, "allreduce/comm/b.py", "from allreduce.comm import c")
    _write(tmp_path, "allreduce/comm/c.py", "def f():\n    from allreduce.comm import a")
    assert cycles(tmp_path) == []
    _write(tmp_path, "allreduce/comm/c.py", "from . import a")
    (circle,) = cycles(tmp_path)
    assert "allreduce.comm.a -> allreduce.comm.b -> allreduce.comm.c -> allreduce.comm.a" in circle


def _write(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
