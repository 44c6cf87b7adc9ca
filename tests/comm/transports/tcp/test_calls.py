"""How calls reach tcp members: paths and signatures."""

from __future__ import annotations

import pytest

from allreduce.comm.calls.call import Call
from allreduce.comm.selection.choosing import choices_for
from allreduce.comm.transports.tcp import calls as tcp_calls


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (Call("barrier", None, "none", 0, None, "g"), "eager"),
        (Call("all_reduce", "sum", "float32", 1024, None, "g"), "eager"),
        (Call("all_reduce", "sum", "float32", 1025, None, "g"), "direct"),
        (Call("all_reduce", "sum", "float32", 1 << 20, None, "g"), "chain"),
        (Call("all_reduce", "sum", "bfloat16", 1 << 20, None, "g"), "direct"),
        (Call("all_reduce", "mean", "complex128", 1 << 20, None, "g"), "direct"),
        (Call("all_gather", None, "int8", 9, None, "g", (1, 8192)), "direct"),
        (Call("all_to_all", None, "int8", 3, None, "g", (1, 2), (2, 1)), "direct"),
    ],
)
def test_paths(call: Call, path: str) -> None:
    assert tcp_calls.choose(call, 2, choices_for("tcp", 2)).algorithm == path


@pytest.mark.parametrize(
    "call",
    [
        Call("broadcast", None, "bool", 3, 1, "g"),
        Call("reduce_scatter", "sum", "float32", 7, None, "g", (3, 4)),
        Call("all_to_all", None, "float32", 0, None, "g", (2, 3), (4, 1)),
        Call("recv", None, "float32", 5, -1, "g", tag=-1),
    ],
)
def test_signatures_tell_the_call(call: Call) -> None:
    told = tcp_calls.annotated(tcp_calls.encode(call, "here"), b"a note")
    assert tcp_calls.decode(told, "g") == call
    assert tcp_calls.note_of(told) == b"a note"
