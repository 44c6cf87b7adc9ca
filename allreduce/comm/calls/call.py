"""A collective call as one value, its text for people and its form for native code."""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from allreduce import _native

Array = NDArray[Any]  # of any dtype and shape

# Positions are the native enums' values (kernels/core/call.h, reduce_kernels.h).
COLLECTIVES = (
    *("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "empty"),
    *("reduce", "gather", "scatter", "all_to_all", "send", "recv"),
)
PAGE = mmap.PAGESIZE  # `empty` counts these: a member's part can then be mapped by itself
MESSAGES = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
WHOLE = ("all_reduce", "reduce", "broadcast")  # the output is shaped as the input
TO_ROOT = ("reduce", "gather")  # only the root gets a result
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
PATHS = ("eager", "direct", "staged", "cross_process", "pairwise", "chain")
COUNT_LIMIT = 1 << 36  # more than a signature can count
ANY = -1  # source or tag of a recv that takes every one


# The types that each operator supports: those with a native kernel.
CARRIES = {
    op: frozenset(
        dtype for type, dtype in enumerate(DTYPES) if type and _native.carries(code, type)
    )
    for code, op in enumerate(OPERATORS)
    if code
}


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call; every member of `group` must make the same."""

    collective: str
    op: str | None
    dtype: str
    # Elements of the array, or of one member's share for collectives that join or split shares.
    # With unequal shares, the total; 0 for an all_to_all with unequal shares.
    count: int
    root: int | None  # also the peer of send and recv; -1 is any source
    group: str
    # Elements of each member's share if they differ; for all_to_all, of the shares that this member
    # sends.
    counts: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None  # all_to_all with counts: elements from each member
    tag: int | None = None  # of send and recv; -1 is any
    call_text: str = ""  # the caller's text if it differs from this call (call_text.py); must agree
    row: int = field(default=1, compare=False)  # elements per row; callers give counts in rows

    def __str__(self) -> str:
        """Format as the caller wrote it: `all_reduce(float32[1000], op='sum')`."""
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

    def shares(self, members: int) -> tuple[int, ...]:
        """Return the elements of each member's share."""
        return self.counts if self.counts is not None else (self.count,) * members

    def _rows(self, counts: tuple[int, ...]) -> list[int]:
        return [count // max(1, self.row) for count in counts]


def starts(shares: Sequence[int]) -> list[int]:
    """Return where each share begins in the joined array."""
    return [0, *accumulate(shares)][:-1]


def shaped(call: Call, shape: str) -> str:
    """Format a call with its array's shape, "2, 500" or "()", in place of the element count."""
    return str(call).replace(f"[{call.count}]", f"[{shape.rstrip(',').strip('()')}]", 1)


def agreed_shape(call: Call, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part of an array's shape that must be equal on all members."""
    if call.collective in MESSAGES:
        return ()
    return shape if call.collective in WHOLE else shape[1:]


@lru_cache(maxsize=1024)
def digest(call_text: str) -> int:
    """Return a 64-bit hash of a call's text; 0 for an empty text."""
    hashed = hashlib.blake2b(call_text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") if call_text else 0


_PEERS = {"send": "dest", "recv": "source"}  # the name of the peer's argument


def _any(number: int) -> str:
    return "ANY" if number < 0 else str(number)


def remedy(op: str, dtype: str) -> str:
    """Explain why an operator does not support a type, and name the remedy."""
    if dtype.startswith("complex"):
        if op in ("min", "max"):
            return "complex numbers have no order; reduce their abs() or real part"
        return "complex numbers support sum and mean; all_gather them and combine them here"
    if op.startswith("bitwise"):
        return (
            "floats have no bitwise operators; convert to an integer type, or view the array as one"
        )
    if dtype == "bool" and op in ("min", "prod"):
        return "use logical_and"
    if dtype == "bool" and op == "max":
        return "use logical_or"
    if dtype == "bool" and op == "sum":
        return "use logical_or, or convert to int64 to count"
    if dtype == "bool":  # a mean
        return "convert to float64 to get the fraction of True"
    return "the mean of integers is not an integer; convert to float64, or use sum"


_ITEM_BYTES = {"none": 0, "bytes": 0, "bool": 1}


def item_bytes(dtype: str) -> int:
    """Return the size of an element in bytes: 4 for "float32"."""
    found = _ITEM_BYTES.get(dtype)
    return int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 if found is None else found


def kind(collective: str, op: str | None = None, root: int = 0) -> int:
    """Pack collective, operator and root into one integer for native code."""
    return COLLECTIVES.index(collective) | OPERATORS.index(op or "none") << 4 | root << 8


def from_native(words: tuple[int, int, int, int, int, int], group: str) -> Call:
    """Build a call from native words: collective, operator, type, path, root, count."""
    collective, op, dtype, _, root, count = words
    name = COLLECTIVES[collective]
    if name == "empty":  # counts pages, to fit 36 bits
        return Call(name, None, "bytes", count * PAGE, None, group)
    return Call(
        name,
        OPERATORS[op] if op else None,
        DTYPES[dtype],
        count,
        root if name in ROOTED else None,
        group,
    )


TEXT_BYTES = 100  # a longer text is cut and ends with a digest of the whole text
_END = 64  # characters of a cut text's end
_DIGEST = re.compile(r" #[0-9a-f]{12}$")


def bounded(text: str, end: str = ")") -> str:
    """Cut a call's text to `TEXT_BYTES`: `all_reduce([float32[7], ... 101 arrays], op='sum') #…`.

    Args:
        end: What a cut text ends with, before the digest of the whole.
    """
    if len(text) <= TEXT_BYTES:
        return text
    end = f"...{end}" if len(end) <= _END else f"...{end[:_END]}...)"
    end += f" #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    return text[: TEXT_BYTES - len(end)] + end


def without_digest(text: str) -> str:
    """Return a call's text without the digest."""
    return _DIGEST.sub("", text)


def list_length(text: str) -> int | None:
    """Parse the number of arrays from the text of a list call; None for other calls."""
    name, _, rest = text.partition("([")
    if not rest or not name.isidentifier():
        return None
    cut = re.search(r"\.\.\. (\d+) arrays\]", rest)
    return int(cut[1]) if cut else rest.count("[")


NativeCall = tuple[object, ...]  # collective, operator, type, root, count, counts, receives


def native_words(call: Call) -> NativeCall:
    """Return a call as the tuple that native code takes."""
    return (
        COLLECTIVES.index(call.collective),
        OPERATORS.index(call.op or "none"),
        0 if call.dtype == "bytes" else DTYPES.index(call.dtype),
        0 if call.root is None else call.root,
        call.count,
        call.counts,
        call.receives,
    )
