"""Compare the code of two commits with names left out.

A commit that moves or renames must change nothing else. To check the last commit, run

    python tests/tools/same_syntax.py HEAD~1 HEAD

It prints each file whose syntax differs and exits with 1. Python is compared as syntax trees
without identifiers, imports, docstrings and texts; C++ as tokens without identifiers, includes,
comments and texts. Files without a counterpart in the other commit are listed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

_CPP = (".cpp", ".h", ".cu", ".cuh")
_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r'|^[ \t]*#[ \t]*include[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    r"|[A-Za-z_]\w*|\.?\d[\w.']*|[^\s\w]",
    re.DOTALL | re.MULTILINE,
)
_KEYWORDS = frozenset(
    """alignas auto bool break case catch char class const const_cast constexpr continue
    default delete do double else enum explicit extern false final float for friend if
    inline int long mutable namespace new noexcept nullptr operator override private
    protected public reinterpret_cast return short signed sizeof static static_cast struct
    switch template this thread_local throw true try typedef typename union unsigned using
    virtual void volatile while""".split()  # noqa: SIM905
)


def shape(path: str, source: str) -> str:
    """Return the syntax of a source file, one node or token to a line, without names."""
    if path.endswith(_CPP):
        return "\n".join(_tokens(source))
    return "\n".join(_nodes(ast.parse(source), 0))


def _tokens(source: str) -> Iterator[str]:
    for match in _TOKEN.finditer(source):
        token = match.group()
        if token.startswith(("//", "/*")) or token.lstrip().startswith("#"):
            continue
        if token[0] in "\"'":
            yield "text"
        elif re.match(r"[A-Za-z_]", token) and token not in _KEYWORDS:
            yield "name"
        else:
            yield token


def _nodes(node: ast.AST, depth: int) -> Iterator[str]:
    """List a node and what it contains, as lines indented by depth."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return
    value = ""
    if isinstance(node, ast.Constant):
        value = "text" if isinstance(node.value, str | bytes) else repr(node.value)
    yield f"{' ' * depth}{type(node).__name__} {value}"
    for child in ast.iter_child_nodes(node):
        if not _is_text_statement(child):  # docstrings
            yield from _nodes(child, depth + 1)


def _is_text_statement(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def pairs(old: str, new: str) -> Iterator[tuple[str | None, str | None]]:
    """Pair the paths that changed between two commits; None where one side has no such file."""
    listing = _git("diff", "--find-renames=20%", "-l0", "--name-status", "-z", old, new).split("\0")
    fields = iter(listing[:-1])
    for status in fields:
        first = next(fields)
        if status[0] in "RC":
            yield first, next(fields)
        else:
            yield (None if status == "A" else first), (None if status == "D" else first)


def main(old: str, new: str) -> int:
    """Print what differs in syntax; returns the exit code."""
    differing = 0
    for before, after in pairs(old, new):
        path = after or before or ""
        if not path.endswith((".py", *_CPP)):
            continue
        if before is None or after is None:
            print(f"{path}: only in {old if after is None else new}")
            differing += 1
        elif shape(before, _git("show", f"{old}:{before}")) != shape(
            after, _git("show", f"{new}:{after}")
        ):
            print(f"{before} -> {after}: syntax differs")
            differing += 1
    print(f"{differing} files differ beyond names")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
