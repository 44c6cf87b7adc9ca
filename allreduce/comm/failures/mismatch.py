"""Errors for members that made different calls: both calls, their sites and a remedy."""

from __future__ import annotations

from typing import NamedTuple

from allreduce.comm.calls.call import MESSAGES, Call, list_length, shaped, without_digest
from allreduce.comm.calls.call_site import Note
from allreduce.errors import Finding, MismatchError

_EQUAL = "must be equal on all ranks"
_ORDER = "every rank must make the same calls in the same order"
_KINDS = "every rank must pass one array, or every rank a list of them"
_INTERNAL = ("exchange", "total", "adopt")  # calls that the library makes itself


class Side(NamedTuple):
    """One of the two members of a mismatch."""

    member: str  # "rank 2"
    call: Call
    note: Note
    here: bool = False
    rank: int = -1  # of the member, for a collective

    def __str__(self) -> str:
        """Format the call with its shape, if known, the call site and the member."""
        shape = self.note.shape
        text = without_digest(self.call_text) or (
            shaped(self.call, shape) if shape else str(self.call)
        )
        site = self.note.site or "(call site not known yet)"
        place = f"at {site}" if self.note.site else site
        return f"{text} {place} {self.whose}"

    @property
    def whose(self) -> str:
        """The caller: "here" or "on rank 2"."""
        return "here" if self.here else f"on {self.member}"

    @property
    def call_text(self) -> str:
        """The caller's text, if it is more than the call."""
        return self.call.call_text or self.note.call_text

    @property
    def name(self) -> str:
        """The name of the called function."""
        return self.call_text.partition("(")[0] or self.call.collective


def mismatch(where: str, what: str, first: Side, second: Side, hidden: str = "") -> MismatchError:
    """Build the error of two members that disagree; see `describe` for the arguments."""
    text = describe(what, first, second, hidden)
    error = MismatchError(f"{where}: {text}")
    error.finding = Finding("mismatch", text)
    error.calls = first.call_text, second.call_text
    if _lists_differ(first, second):
        low, high = (second, first) if second.here else (first, second)
        error.lists = ((low.rank, low.whose), (high.rank, high.whose))
    return error


def _lists_differ(first: Side, second: Side) -> bool:
    """Return whether the calls have lists of equal length that differ in an array."""
    numbers = [list_length(side.call_text) for side in (first, second)]
    alike = (first.call.op, first.call.root) == (second.call.op, second.call.root)
    same = first.name == second.name and None not in numbers and numbers[0] == numbers[1]
    return same and alike and first.call_text != second.call_text


def describe(what: str, first: Side, second: Side, hidden: str = "", remedy: str = "") -> str:
    """Describe the calls of two members, this member's first, and the remedy.

    Args:
        what: "call #41", or "a message".
        first: This member's side.
        second: The other member's side.
        hidden: A difference that is not visible in the calls' texts.
        remedy: In the place of the one that follows from the calls.
    """
    low, high = (second, first) if second.here else (first, second)
    same = first.note.shape == second.note.shape
    rest = f"{'counts' if same else 'shapes'} {_EQUAL}"
    mend = remedy or _remedy_of(first, second) or hidden or rest
    return f"{what} differs: {low}, but {high}; {mend}"


def _remedy_of(first: Side, second: Side) -> str:
    message = {first.name, second.name} == set(MESSAGES)
    if first.name != second.name and not message:
        return _ORDER
    if first.name in _INTERNAL and first.call_text != second.call_text:
        return _ORDER
    if first.name == "empty":
        return f"shapes and types {_EQUAL}"
    arguments = f"arrays, counts and factors {_EQUAL}"
    numbers = [list_length(side.call_text) for side in (first, second)]
    if bool(first.call_text) != bool(second.call_text):
        if first.name == "scatter":  # without `out` it begins with another call
            return "every rank must make the same call: all pass out=, or none do"
        lists = numbers != [None, None]
        return _KINDS if lists else arguments
    if None not in numbers and numbers[0] != numbers[1]:
        lengths = ", ".join(
            f"{side.member}: {number}"
            for side, number in zip((first, second), numbers, strict=True)
        )
        return f"lists must have the same number of arrays on all ranks ({lengths})"
    if first.call.collective != second.call.collective and not message:
        return arguments
    if _lists_differ(first, second):
        return f"each array's shape and type, and the factors, {_EQUAL}"
    return _remedy(first.call, second.call) or (
        arguments if first.call_text != second.call_text else ""
    )


def _remedy(a: Call, b: Call) -> str:
    if a.dtype != b.dtype:
        return f"types {_EQUAL}: cast before the call"
    if a.op != b.op:
        return "every rank must name the same operator"
    if a.collective == b.collective and a.root != b.root:
        return "every rank must name the same root"
    if {a.collective, b.collective} == set(MESSAGES):
        return "both must have as many elements"
    if a.receives is not None and b.receives is not None:
        return ""  # members may send different counts
    if a.counts != b.counts:
        return "every rank must name the same counts"
    if a.count == b.count:
        return ""
    joined = a.collective in ("all_gather", "gather")
    return f"shapes {_EQUAL}{', or pass counts= with the rows of each' if joined else ''}"
