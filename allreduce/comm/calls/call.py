"""What a collective call is, in one value: its signature, its log line, a plan's input."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]  # of any dtype and shape

# Positions are the native enums' values (kernels/core/call.h, reduce_kernels.h).
COLLECTIVES = (
    *("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "empty"),
    *("reduce", "gather", "scatter", "all_to_all", "send", "recv"),
)
MESSAGES = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPERATORS = (
    "none",
    "sum",
    "mean",
    "min",
    "max",
    "prod",
    "logical_and",
    "logical_or",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
)
DTYPES = (
    "none",
    "float32",
    "float64",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
)
PATHS = ("small", "direct", "staged", "pulled", "exchanged", "chain")
COUNT_LIMIT = 1 << 36  # what a signature cannot count any more
ANY = -1  # source or tag of a recv that takes every one


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_INTEGERS = frozenset(name for name in DTYPES if name.lstrip("u").startswith("int"))
_COMPLEX = frozenset({"complex64", "complex128"})
_BOOL = frozenset({"bool"})
_REAL = _FLOATS | _INTEGERS
# The types an operator makes sense on: where the native table has a kernel.
CARRIES = {
    "sum": _REAL | _COMPLEX,
    "mean": _FLOATS | _COMPLEX,
    "min": _REAL,
    "max": _REAL,
    "prod": _REAL,
    "logical_and": _REAL | _BOOL,
    "logical_or": _REAL | _BOOL,
    "bitwise_and": _INTEGERS | _BOOL,
    "bitwise_or": _INTEGERS | _BOOL,
    "bitwise_xor": _INTEGERS | _BOOL,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call, as every member of `group` has to make it."""

    collective: str
    op: str | None
    dtype: str
    # Elements: of the array, or of one member's share where shares are joined or cut. Of all shares
    # together where they differ; 0 for an all_to_all of such.
    count: int
    root: int | None  # also the peer of send and recv; -1 is any source
    group: str
    counts: tuple[int, ...] | None = None  # elements of each member's share where they differ; of
    # all_to_all, what this member sends to each
    receives: tuple[int, ...] | None = None  # of all_to_all with counts: what it gets from each
    tag: int | None = None  # of send and recv; -1 is any
    call_text: str = (
        ""  # what the caller wrote, where that is not just this (call_text.py); it must agree
    )
    row: int = field(default=1, compare=False)  # elements of a row, in which callers give counts

    def __str__(self) -> str:
        """Say it as the caller wrote it: `all_reduce(float32[1000], op='sum')`."""
        if self.call_text:
            return without_digest(self.call_text)
        if self.collective == "barrier":
            return "barrier()"
        if self.collective == "empty":
            return f"empty({self.count} bytes)"
        text = f"{self.dtype}[{self.count}]"
        if self.op is not None:
            text += f", op={self.op!r}"
        if self.root is not None:
            text += f", {_PEERS.get(self.collective, 'root')}={_any(self.root)}"
        if self.tag is not None:
            text += f", tag={_any(self.tag)}"
        if self.counts is not None:
            text += f", counts={self._rows(self.counts)}"
        if self.receives is not None:
            text += f", receives={self._rows(self.receives)}"
        return f"{self.collective}({text})"

    def _rows(self, counts: tuple[int, ...]) -> list[int]:
        return [count // max(1, self.row) for count in counts]


def shaped(call: Call, shape: str) -> str:
    """Say a call with its array's shape, "2, 500", or "()" of a number, for the elements."""
    return str(call).replace(f"[{call.count}]", f"[{shape.rstrip(',').strip('()')}]", 1)


def agreed_shape(call: Call, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of an array's axes that must be equal on all members."""
    if call.collective in MESSAGES:
        return ()
    return shape if call.collective in ("all_reduce", "reduce", "broadcast") else shape[1:]


@lru_cache(maxsize=1024)
def digest(call_text: str) -> int:
    """Return 64 bits of what was call_text, for comparisons; 0 of nothing."""
    told = hashlib.blake2b(call_text.encode(), digest_size=8).digest()
    return int.from_bytes(told, "little") if call_text else 0


_PEERS = {"send": "dest", "recv": "source"}  # what callers name the peer


def _any(number: int) -> str:
    return "ANY" if number < 0 else str(number)


def remedy(op: str, dtype: str) -> str:
    """Say why an operator does not carry a type, and what to do instead."""
    if dtype in _COMPLEX:
        if op in ("min", "max"):
            return "complex numbers have no order; reduce their abs() or real part"
        return "of complex numbers there are sum and mean; all_gather them and combine them here"
    if op.startswith("bitwise"):
        return "bits of a float are no number; convert to an integer type, or use a view of one"
    if dtype == "bool" and op in ("min", "prod"):
        return "use logical_and"
    if dtype == "bool" and op == "max":
        return "use logical_or"
    if dtype == "bool" and op == "sum":
        return "use logical_or, or convert to int64 to count"
    if dtype == "bool":  # a mean
        return "convert to float64 for the share of True"
    return "a mean of integers is no integer; convert to float64, or use sum"


_ITEM_BYTES = {"none": 0, "bytes": 0, "bool": 1}


def item_bytes(dtype: str) -> int:
    """Return the size of an element: of "float32", 4."""
    found = _ITEM_BYTES.get(dtype)
    return int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 if found is None else found


def kind(collective: str, op: str | None = None, root: int = 0) -> int:
    """Pack what the native side needs to know of a call besides its arrays."""
    return COLLECTIVES.index(collective) | OPERATORS.index(op or "none") << 4 | root << 8


def from_native(words: tuple[int, int, int, int, int, int], group: str) -> Call:
    """Read the native description: collective, operator, type, path, root, count."""
    collective, op, dtype, _, root, count = words
    name = COLLECTIVES[collective]
    if name == "empty":  # counted in pages, so that 36 bits suffice
        return Call(name, None, "bytes", count * 4096, None, group)
    return Call(
        name,
        OPERATORS[op] if op else None,
        DTYPES[dtype],
        count,
        root if name in ROOTED else None,
        group,
    )


TEXT_BYTES = 100  # a longer text is cut, and ends with a digest of all of it
_DIGEST = 8  # characters, of 6 bits each
_CUT = re.compile(r"\.\.\. (\d+) arrays\](.*), #[\w-]+\)$")


def list_call_text(name: str, arrays: Sequence[str], options: str) -> str:
    """Write a call of a list: `all_reduce([float32[7], ... 101 arrays], op='sum', #digest)`.

    Args:
        name: The collective's.
        arrays: Each as `float32[7]`.
        options: What follows them: `, op='sum'`.
    """
    text = f"{name}([{', '.join(arrays)}]{options})"
    if len(text) <= TEXT_BYTES:
        return text
    start, count = f"{name}([", f"... {len(arrays)} arrays]"
    left = TEXT_BYTES - len(start) - len(count) - len(", #)") - _DIGEST
    if len(options) > left:
        options = f"{options[: left - 3]}..."
    shown = ", ".join(arrays)[: left - len(options)]
    digest = base64.urlsafe_b64encode(hashlib.blake2b(text.encode(), digest_size=6).digest())
    return f"{start}{shown}{count}{options}, #{digest.decode()})"


def without_digest(text: str) -> str:
    """Return a call's text without the digest, for people."""
    return _CUT.sub(r"... \1 arrays]\2)", text) if ", #" in text else text


def list_length(text: str) -> int | None:
    """Read how many arrays a call of a list has; None of another call."""
    name, _, rest = text.partition("([")
    if not rest or not name.isidentifier():
        return None
    cut = _CUT.search(rest)
    return int(cut[1]) if cut else rest.count("[")


NativeCall = tuple[object, ...]  # collective, operator, type, root, count, counts, receives


def native_words(call: Call) -> NativeCall:
    """Return a call as native code takes it where there is no array to read it from."""
    return (
        COLLECTIVES.index(call.collective),
        OPERATORS.index(call.op or "none"),
        0 if call.dtype == "bytes" else DTYPES.index(call.dtype),
        0 if call.root is None else call.root,
        call.count,
        call.counts,
        call.receives,
    )


def in_place(call: Call, x: Array | None, out: Array | None, me: int) -> bool:
    """Say whether a member's own part of the output is that of the input, in memory."""
    if x is None or out is None:
        return False
    shares = [call.count] * me if call.counts is None else call.counts[:me]
    before = sum(shares) * x.itemsize
    start, end = x.ctypes.data, out.ctypes.data
    if call.collective == "scatter" and me == call.root:
        start += before
    elif call.collective in ("all_gather", "gather"):
        end += before
    return bool(start == end)
