"""Every name that the library takes of CUDA's packages exists in them, and takes what it is given.

Read from the library's sources: attributes of the imported modules, and calls of what they hold,
also those in the form `call(function, *arguments)`. The real packages say what they accept, by
their signatures or, where Cython has none, by the first line of the documentation.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from allreduce.comm.transports.nccl import library
from tests.gpu import launch

PACKAGES = ("cuda", "nccl", "cupy")
STANDINS = launch.ROOT / "tests" / "gpu" / "standins"


@dataclass
class Source:
    """A file of the library, and what its names of CUDA's packages stand for."""

    path: Path
    tree: ast.Module
    names: dict[str, Any]

    def find(self, node: ast.expr) -> Any:
        """Return what `name.attribute...` stands for, or None; an AssertionError if it is gone."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        holder = self.find(node.value)
        if holder is None or not (inspect.ismodule(holder) or inspect.isclass(holder)):
            return None
        where = f"{self.path.relative_to(launch.ROOT)}:{node.lineno}"
        assert hasattr(holder, node.attr), f"{where}: {holder} has no {node.attr}"
        return getattr(holder, node.attr)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
    """Give the names that an import makes of CUDA's packages, also by one of our own modules."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in PACKAGES:
                yield alias.asname or alias.name, importlib.import_module(alias.name)
        return
    top = (node.module or "").split(".")[0]
    ours = {}
    if top == "allreduce":
        path = launch.ROOT / f"{(node.module or '').replace('.', '/')}.py"
        ours = names_of(path) if path.exists() else {}
    for alias in node.names:
        if top in PACKAGES:
            module = importlib.import_module(str(node.module))
            if not hasattr(module, alias.name):  # a module within it
                importlib.import_module(f"{node.module}.{alias.name}")
            yield alias.asname or alias.name, getattr(module, alias.name)
        elif alias.name in ours:
            yield alias.asname or alias.name, ours[alias.name]


@cache
def names_of(path: Path) -> dict[str, Any]:
    nodes = ast.walk(ast.parse(path.read_text()))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return dict(pair for node in imports for pair in imported(node))


def sources() -> list[Source]:
    paths = sorted((launch.ROOT / "allreduce").rglob("*.py"))
    found = [Source(path, ast.parse(path.read_text()), names_of(path)) for path in paths]
    return [source for source in found if source.names]


def expanded(arguments: list[ast.expr]) -> list[ast.expr]:
    """Take literal tuples out of their stars."""
    out: list[ast.expr] = []
    for argument in arguments:
        is_literal = isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
        out += expanded(argument.value.elts) if is_literal else [argument]  # type: ignore[attr-defined]
    return out


def parameters(thing: Any) -> list[tuple[str, bool]] | None:
    """List a function's parameters: name, and whether it may be left out. None: unknown."""
    try:
        given = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given):
            return None
        return [(p.name, p.default is not p.empty) for p in given]
    except (TypeError, ValueError):
        pass
    head = re.match(r"[\w.]+\((.*?)\)", (getattr(thing, "__doc__", None) or "").strip())
    if not head:
        return None
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", head[1]) if part.strip()]
    return [
        (part.split("=")[0].split(":")[0].split()[-1], "=" in part)
        for part in parts
        if part not in ("self", "*", "/")
    ]


def calls(source: Source) -> Iterator[tuple[int, Any, list[ast.expr], list[str]]]:
    """Give each call of something in CUDA's packages: line, function, arguments, keywords."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or any(each.arg is None for each in node.keywords):
            continue
        arguments, keywords = expanded(node.args), [str(each.arg) for each in node.keywords]
        function = source.find(node.func)
        if function is None and arguments:  # call(function, *arguments)
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name == "call":
                function = source.find(arguments.pop(0))
        if callable(function) and not any(isinstance(a, ast.Starred) for a in arguments):
            yield node.lineno, function, arguments, keywords


def test_names_and_arguments_are_those_of_the_real_packages() -> None:
    checked = 0
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                source.find(node)
        for line, function, arguments, keywords in calls(source):
            taken = parameters(function)
            if taken is None:
                continue
            checked += 1
            where = f"{source.path.relative_to(launch.ROOT)}:{line}: {function}"
            known = [name for name, _ in taken]
            assert set(keywords) <= set(known), f"{where} takes {known}, not {keywords}"
            assert len(arguments) + len(keywords) <= len(known), f"{where} takes {known}"
            missing = [
                name
                for name, is_optional in taken[len(arguments) :]
                if not is_optional and name not in keywords
            ]
            assert not missing, f"{where} also needs {missing}"
    assert checked >= 20, f"only {checked} calls were found: the scanner misses them"


def test_nccl_is_asked_for_all_calls_that_are_made() -> None:
    """The library looks for these in libnccl before the first of them."""
    folder = launch.ROOT / "allreduce" / "comm" / "transports" / "nccl"
    made = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"\bapi\.([a-z]\w+)\(", path.read_text())
    }
    assert made == set(library.CALLS)


def test_the_stand_in_nccl_takes_the_arguments_of_the_real_one() -> None:
    declared = (launch.packages() / "nccl" / "bindings" / "cynccl.pxd").read_text()
    real = dict(re.findall(r"^cdef \w[\w* ]*? \*?(nccl\w+)\((.*?)\) except", declared, re.M))
    files = (STANDINS / "nccl").glob("*.cpp")
    ours = "".join(each.read_text().partition('extern "C" {')[2] for each in files)
    made = dict(re.findall(r"^[\w ]+?[ *](nccl\w+)\(([^)]*)\) \{", ours, re.M))
    assert len(made) > 25
    for name, arguments in made.items():
        assert arguments.count(",") == real[name].count(","), f"{name}({real[name]})"
