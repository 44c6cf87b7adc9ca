"""The events that order instructions on different streams."""

from __future__ import annotations

import numpy as np
import pytest

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import Spec
from allreduce.graph.schedule.schedule import bind

SPEC = Spec((3,), np.dtype(np.float32))


def node(number: int, op: str, device: str, *inputs: int) -> Node:
    return Node(number, op, inputs, {}, SPEC, DeviceName.parse(device).complete())


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ("CPU:0", "CPU:1", ()),  # one communicator, whose calls end in order
        ("GPU:0", "CPU:0", (0,)),
        ("GPU:0", "GPU:1", (0,)),
        ("GPU:0", "GPU:0", ()),  # one stream
    ],
)
def test_a_wait_covers_earlier_collectives_that_end_before(
    first: str, second: str, waits: tuple[int, ...]
) -> None:
    instructions = bind(
        [
            node(0, "all_reduce", first),
            node(1, "all_reduce", second),
            node(2, "exp", first, 1),
            node(3, "exp", first, 0),
        ],
        {},
    )
    assert instructions[2].waits == (1,)
    assert instructions[3].waits == waits
