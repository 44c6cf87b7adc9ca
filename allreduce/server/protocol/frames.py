"""Frames: what goes over a data connection, and how its bytes begin.

A frame is a head with the numbers that differ from step to step, a protobuf message with all that
does not, and the bytes of the arrays that the message describes. Steps repeat their descriptions,
so each is parsed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from allreduce.server.protocol import task_pb2 as pb

KINDS = "biufc"  # of dtypes that travel: NumPy's numbers
_MOST_ARRAY_BYTES = 1 << 36
_REMEMBERED = 512  # descriptions
_SHORT = 1 << 10  # bytes of one that is remembered


@dataclass(slots=True)
class Frame:
    """A message, without its arrays.

    Attributes:
        kind: What to do with it, a `pb.Kind`.
        about: What it is about. That of a frame that has come is shared with equal ones.
        request: A number that the answer repeats.
        step: The step that it belongs to.
    """

    kind: int
    about: pb.Description = field(default_factory=pb.Description)
    request: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """An array that follows a frame.

    Attributes:
        elsewhere: Where its bytes are, if they do not follow the frame on the socket.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int
    elsewhere: pb.Array | None


@lru_cache(_REMEMBERED)
def announce(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Describe an array whose bytes follow; messages of protobuf that are joined are one."""
    return pb.Description(arrays=[pb.Array(dtype=dtype.str, shape=shape)]).SerializeToString()


def parse(description: bytes) -> tuple[pb.Description, tuple[Announced, ...]]:
    """Read a description; the result may be shared.

    Raises:
        ValueError: It announces an array with no type of numbers, or of an absurd size.
        DecodeError: It is no description.
    """
    return _parse_again(description) if len(description) <= _SHORT else _parse(description)


def _parse(description: bytes) -> tuple[pb.Description, tuple[Announced, ...]]:
    about = pb.Description.FromString(description)
    return about, tuple(map(_announced, about.arrays))


_parse_again = lru_cache(_REMEMBERED)(_parse)


def _announced(header: pb.Array) -> Announced:
    try:
        dtype = np.dtype(header.dtype)
    except TypeError as error:
        raise ValueError(f"it sent an array of type {header.dtype!r}") from error
    shape = tuple(header.shape)
    if dtype.kind not in KINDS or min(shape, default=0) < 0:
        raise ValueError(f"it sent an array of {dtype} with shape {shape}")
    nbytes = prod(shape) * dtype.itemsize
    if nbytes > _MOST_ARRAY_BYTES:
        raise ValueError(f"it sent an array of shape {shape}")
    return Announced(dtype, shape, nbytes, header if header.segment or header.by_mpi else None)
