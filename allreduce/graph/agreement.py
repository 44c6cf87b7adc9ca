"""Replicas of several processes compare what variables they have, before they share values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.comm import Communicator
from allreduce.errors import MismatchError
from allreduce.graph.spec import show
from allreduce.graph.variable import Variable

_REMEDY = "make the same model, and use the same variables, on every rank"

Row = tuple[str, tuple[int, ...], str]  # a variable's name, shape and dtype


def check_same(communicator: Communicator, rank: int, variables: Sequence[Variable]) -> None:
    """Compare all variables' names, shapes and dtypes at once; all members call it.

    One small exchange where they agree; a second one where they do not, to say how.

    Args:
        communicator: Has one member per replica.
        rank: This process's, for messages.
        variables: What the members are about to share, in order.

    Raises:
        MismatchError: They differ; the message names the first difference. On all members.
    """
    rows = [(v.name, v.shape, v.dtype.name) for v in variables]
    text = json.dumps([rank, rows]).encode()
    compared = [(_own_part(name), shape, dtype) for name, shape, dtype in rows]
    state = hashlib.blake2b(json.dumps(compared).encode(), digest_size=16).digest()
    mine = np.append(np.frombuffer(state, np.int64), len(text))
    found = np.asarray(communicator.all_gather(mine)).reshape(communicator.size, -1)
    differing = np.flatnonzero((found[:, :2] != found[0, :2]).any(axis=1))
    if not len(differing):
        return
    words = -(-int(found[:, 2].max()) // 8)
    padded = np.frombuffer(text.ljust(words * 8), np.int64)
    texts = np.asarray(communicator.all_gather(padded)).reshape(communicator.size, words)
    first, other = (json.loads(texts[member].tobytes()) for member in (0, differing[0]))
    raise MismatchError(f"rank {rank}: {_difference(*first, *other)}; {_REMEDY}")


def _own_part(name: str) -> str:
    """Leave out a model's own name: its number counts the models of one process."""
    return name.partition("/")[2] or name


def _difference(rank: int, rows: Sequence[Any], other_rank: int, others: Sequence[Any]) -> str:
    """Say where two ranks' lists of variables differ first."""

    def differ(what: str, mine: str, theirs: str) -> str:
        return f"{what} {mine} on rank {rank} but {theirs} on rank {other_rank}"

    for place, (row, other) in enumerate(zip(rows, others, strict=False)):
        (name, shape, dtype), (other_name, other_shape, other_dtype) = row, other
        if _own_part(name) != _own_part(other_name):
            return differ(f"variable {place} of the step is", repr(name), repr(other_name))
        if shape != other_shape:
            return differ(f"variable {name!r} has shape", show(shape), show(other_shape))
        if dtype != other_dtype:
            return differ(f"variable {name!r} has dtype", dtype, other_dtype)
    longer, count = max((rows, others), key=len), min(len(rows), len(others))
    counts = differ("the step has", f"{len(rows)} variables", str(len(others)))
    return f"{counts}, where {longer[count][0]!r} comes next"
