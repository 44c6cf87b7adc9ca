"""Encode calls for native code and for the other members of a tcp communicator."""

from __future__ import annotations

import functools
import json
import math
import struct

from allreduce.comm.calls.call import PATHS, REDUCING, Call, item_bytes, native_words
from allreduce.comm.selection.choosing import Choices
from allreduce.comm.selection.table import Row
from allreduce.errors import UnsupportedError

_AGREED = struct.Struct("<H")  # bytes of a signature that must be equal, including this field
_MAX_SIGNATURE = 59000  # native kMaxSignature, less the longest note


def choose(call: Call, size: int, choices: Choices) -> Row:
    """Choose the algorithm of a call, the same on all members.

    Sums of 16-bit floats and means of complex numbers always go in one hop, so that intermediate
    results are not rounded.
    """
    if size == 1 or call.collective in ("barrier", "empty"):
        return Row("tcp", (call.collective,), "eager")
    unequal = call.collective == "all_to_all" and call.counts is not None
    share = max(call.counts) if call.counts is not None else call.count
    choice = choices.choose(call.collective, None if unequal else share * item_bytes(call.dtype))
    exact = call.collective in REDUCING and (
        call.dtype in ("float16", "bfloat16") or (call.op == "mean" and "complex" in call.dtype)
    )
    return choice._replace(algorithm="direct") if exact and choice.chunk else choice


@functools.lru_cache(maxsize=256)
def words(call: Call, size: int, choices: Choices) -> tuple[object, ...]:
    """Return a call as native code takes it."""
    choice = choose(call, size, choices)
    return (
        native_words(call),
        PATHS.index(choice.algorithm),
        0 if call.tag is None else call.tag,
        choice.chunk or choices.largest_chunk(),
    )


@functools.lru_cache(maxsize=256)
def encode(call: Call, where: str, shape: tuple[int, ...] = ()) -> bytes:
    """Return a call's signature: an equal part, and counts that must match pairwise.

    Args:
        shape: The part of the array's shape that must be equal.

    Raises:
        UnsupportedError: There are too many members for counts of their own.
    """
    exchange = call.collective == "all_to_all" and call.counts is not None
    shown = [call.collective, call.op, call.dtype, call.count, call.root, call.tag]
    if exchange:
        shown[3] = 0  # it differs between members
    counts = None if exchange else call.counts
    text = json.dumps([*shown, counts, call.call_text, shape], separators=(",", ":")).encode()
    pairs = (*(call.counts or ()), *(call.receives or ())) if exchange else ()
    agreed = _AGREED.size + len(text)
    signature = _AGREED.pack(min(agreed, 0xFFFF)) + text + struct.pack(f"<{len(pairs)}Q", *pairs)
    if len(signature) > _MAX_SIGNATURE:
        raise UnsupportedError(
            f"{where}: {call.collective} with counts does not support this many members: the "
            f"counts take {len(signature)} bytes, but the limit is {_MAX_SIGNATURE}"
        )
    return signature


def annotated(signature: bytes, note: bytes) -> bytes:
    """Return the post of a call: its signature with its note."""
    return signature + note + bytes([len(note)])


def note_of(post: bytes) -> bytes:
    """Return the note of a post."""
    return post[-1 - post[-1] : -1]


def decode(post: bytes, group: str) -> Call:
    """Decode the call of a post."""
    signature = post[: -1 - post[-1]]
    (agreed,) = _AGREED.unpack_from(signature)
    fields = json.loads(signature[_AGREED.size : agreed])
    collective, op, dtype, count, root, tag, listed, call_text, shape = fields
    pairs = struct.unpack(f"<{(len(signature) - agreed) // 8}Q", signature[agreed:])
    half = len(pairs) // 2
    counts = pairs[:half] if pairs else (None if listed is None else tuple(listed))
    receives, row = pairs[half:] or None, math.prod(shape) if counts else 1
    return Call(collective, op, dtype, count, root, group, counts, receives, tag, call_text, row)
