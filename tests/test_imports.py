"""The order of packages and of their folders: imports go downwards only, and never in a cycle.

Read from the sources, so that an import inside a function, under TYPE_CHECKING or written as a
registry's text ("allreduce.devices.cpu:CpuRuntime") counts as well.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Lowest first; packages on one level must not import each other. docs/architecture.md shows it.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "importing", "openblas"),
    ("keywords",),
    ("settings", "events"),
    ("_native",),
    ("devices", "cluster"),
    ("comm",),
    ("reduction",),
    ("graph",),
    ("optim", "data"),
    ("parameters",),
    ("callbacks",),
    ("training",),
    ("nn",),
    ("server",),
    ("strategies",),
    ("observe",),
    ("config", "run"),
    ("__init__",),
)
HEIGHT = {package: height for height, packages in enumerate(LEVELS) for package in packages}

# The folders of the large packages, lowest first. A module that stands in no folder may be imported
# from everywhere in its package, as long as there is no cycle.
FOLDERS: dict[str, tuple[str, ...]] = {
    "cluster": ("host", "mpi", "process", "leader", "launcher", "resolvers"),
    "comm": ("calls", "core", "failures", "arguments", "selection", "transports"),
    "graph": (
        *("core", "placement", "consistency", "trace", "ops", "autodiff", "schedule"),
        *("partition", "passes", "update", "execute", "eager", "inspect", "replicate"),
    ),
    "nn": ("core", "losses", "metrics", "layers", "models"),
    "server": ("protocol", "client", "task"),
}

# Where packages are read from: (folder in the repository, what it is imported as).
SOURCES = (("allreduce", "allreduce"), ("strategies", "allreduce.strategies"))

_REGISTRY_TEXT = re.compile(r"allreduce(\.\w+)+(:\w+)?")


@dataclass(frozen=True)
class Import:
    """One module that another one names, and where."""

    importer: str
    imported: str
    place: str  # "allreduce/comm/calls/call.py:12"


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
        parent = module if path.stem == "__init__" else module.rpartition(".")[0]
        for node in _naming(path.read_text()):
            for name in _named(node, parent, known):
                place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}"
                found.append(Import(module, name, place))
    return found


@cache
def _naming(source: str) -> list[ast.AST]:
    """Give the nodes that may name modules: several tests read the same sources."""
    kinds = ast.Import | ast.ImportFrom | ast.Constant
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def _named(node: ast.AST, parent: str, known: dict[str, Path]) -> list[str]:
    """Give the project's modules that a node names, registry texts included."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = parent.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            names.append(whole if whole in known or whole == "allreduce._native" else base)
    elif isinstance(node, ast.Constant) and _REGISTRY_TEXT.fullmatch(str(node.value)):
        names = [name for name in [str(node.value).partition(":")[0]] if name in known]
    return [name for name in names if name.split(".")[0] == "allreduce"]


def package(module: str) -> str:
    """Give the package of a dotted name; the root itself is the package `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def broken_rules(root: Path) -> list[str]:
    """Describe each import against the order of packages, and each package without a place."""
    known = modules(root)
    complaints = [
        f"{path.relative_to(root)}: package {package(module)!r} has no place in LEVELS"
        for module, path in known.items()
        if package(module) not in HEIGHT
    ]
    for each in imports(root, known):
        here, there = package(each.importer), package(each.imported)
        if here == there or here not in HEIGHT:
            continue
        if there not in HEIGHT:
            complaints.append(f"{each.place} imports {each.imported}: no such package")
        elif HEIGHT[there] >= HEIGHT[here]:
            relation = "beside" if HEIGHT[there] == HEIGHT[here] else "above"
            complaints.append(f"{each.place} imports {each.imported}, which is {relation} {here!r}")
    return complaints


def broken_folders(root: Path) -> list[str]:
    """Describe imports against the order of a package's folders, and folders without a place."""
    known = modules(root)
    complaints = []
    for name, order in FOLDERS.items():
        height = {f"allreduce.{name}.{folder}": i for i, folder in enumerate(order)}
        present = {_folder(module) for module in known if package(module) == name} - {""}
        complaints += [f"{folder} has no place in FOLDERS" for folder in present - set(height)]
        for each in imports(root, known):
            here, there = _folder(each.importer), _folder(each.imported)
            if height.get(there, -1) > height.get(here, len(order)):
                complaints.append(f"{each.place} imports {each.imported}, which is above {here}")
    return complaints


def _folder(module: str) -> str:
    """Give the folder of a module in a large package: "allreduce.comm.core"."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 and parts[1] in FOLDERS else ""


def cycles(root: Path) -> list[str]:
    """Describe the cycles among modules, through imports of any kind."""
    known = modules(root)
    edges: dict[str, dict[str, str]] = {module: {} for module in known}
    for each in imports(root, known):
        if each.imported in known and each.imported != each.importer:
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


def test_packages_import_only_lower_ones() -> None:
    assert not broken_rules(REPOSITORY), "\n".join(["", *broken_rules(REPOSITORY)])


def test_folders_import_only_lower_ones() -> None:
    assert not broken_folders(REPOSITORY), "\n".join(["", *broken_folders(REPOSITORY)])


def test_no_module_imports_in_a_cycle() -> None:
    assert not cycles(REPOSITORY), "\n".join(["", *cycles(REPOSITORY)])


def test_the_packages_are_there_to_be_read() -> None:
    packages = {package(module) for module in modules(REPOSITORY)}
    assert packages >= {"errors", "devices", "cluster", "comm", "graph", "strategies", "__init__"}
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
        ("import allreduce.plumbing", "imports allreduce.plumbing: no such package"),
        ("from allreduce.strategies import Mirrored", "imports allreduce.strategies, which is"),
    ],
)
def test_forbidden_imports_are_found(tmp_path: Path, source: str, complaint: str) -> None:
    _write(tmp_path, "allreduce/comm/x.py", source)
    _write(tmp_path, "allreduce/graph/__init__.py", "")
    _write(tmp_path, "allreduce/nn/__init__.py", "")
    (found,) = broken_rules(tmp_path)
    assert complaint in found


def test_siblings_and_unknown_packages_are_found(tmp_path: Path) -> None:
    _write(tmp_path, "allreduce/devices/x.py", "import allreduce.cluster\nimport allreduce.errors")
    _write(tmp_path, "allreduce/cluster/__init__.py", "from allreduce import _native, events")
    _write(tmp_path, "allreduce/events.py", "")
    _write(tmp_path, "allreduce/attic/x.py", "import allreduce.nn")
    attic, sibling = broken_rules(tmp_path)
    assert "package 'attic' has no place in LEVELS" in attic
    assert "devices/x.py:1 imports allreduce.cluster, which is beside 'devices'" in sibling


def test_imports_against_the_order_of_folders_are_found(tmp_path: Path) -> None:
    _write(tmp_path, "allreduce/comm/__init__.py", "")
    _write(tmp_path, "allreduce/comm/top.py", "")
    _write(tmp_path, "allreduce/comm/core/a.py", "import allreduce.comm.calls.b")
    _write(tmp_path, "allreduce/comm/calls/b.py", "from allreduce.comm import top")
    assert broken_folders(tmp_path) == []
    _write(tmp_path, "allreduce/comm/calls/b.py", "def f():\n    from allreduce.comm.core import a")
    _write(tmp_path, "allreduce/comm/attic/c.py", "")
    unknown, upwards = broken_folders(tmp_path)
    assert unknown == "allreduce.comm.attic has no place in FOLDERS"
    assert "calls/b.py:2 imports allreduce.comm.core.a, which is above" in upwards


@pytest.mark.parametrize(
    "closing",
    [
        "from . import a",
        "def f():\n    from allreduce.comm import a",
        "if TYPE_CHECKING:\n    from allreduce.comm.a import A",
    ],
)
def test_cycles_are_found(tmp_path: Path, closing: str) -> None:
    _write(tmp_path, "allreduce/comm/a.py", "from allreduce.comm.b import B")
    _write(tmp_path, "allreduce/comm/b.py", "from allreduce.comm import c")
    _write(tmp_path, "allreduce/comm/c.py", "")
    assert cycles(tmp_path) == []
    _write(tmp_path, "allreduce/comm/c.py", closing)
    (circle,) = cycles(tmp_path)
    assert "allreduce.comm.a -> allreduce.comm.b -> allreduce.comm.c -> allreduce.comm.a" in circle


def _write(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
