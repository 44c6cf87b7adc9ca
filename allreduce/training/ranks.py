"""What ranks tell each other around the steps: that they agree, and rows of results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from allreduce import comm
from allreduce.errors import MismatchError, UsageError
from allreduce.graph.replicator import Replicator, default_replicator

# What ranks compare beside arrays, and what to do where it differs.
OPTIONS = "a batch_size, epochs, shuffle or data option"
VARIABLES = "the value of the model's variables"
EPOCHS = "the number of epochs that the model was trained for"
PARTS = "the dtype or shape of a part"
_SAME_ARRAYS = (
    'load the same on every rank, in the same order, or pass data="sharded" if each rank has rows '
    "of its own"
)
_REMEDIES: Mapping[str, str] = {
    OPTIONS: "pass the same options on every rank",
    VARIABLES: "call set_weights, load_weights and assign on every rank, with equal values",
    EPOCHS: "train the model, or load it with load_model, on every rank",
    PARTS: "cast or reshape it before gathering",
}


def rank_of(replicator: Replicator) -> int:
    """Give this process's rank; 0 where it is alone."""
    return replicator.communicator.rank if replicator.communicator else 0


def size_of(replicator: Replicator) -> int:
    """Give the number of ranks."""
    return replicator.communicator.size if replicator.communicator else 1


def check_world(replicator: Replicator, what: str) -> None:
    """Refuse to train one replica per process as if the others were not there.

    Raises:
        UsageError: The replicator is the default one, and there are several processes.
    """
    if replicator is not default_replicator():
        return
    world = comm.world()
    if world.size > 1:
        raise UsageError(
            f"{what} on rank {world.rank} of {world.size}: the model was made without a strategy, "
            "so every process would work by itself; make it, or load it, inside `with "
            "ar.MultiWorkerMirroredStrategy().scope():`"
        )


def digest(value: Any, *, contents: bool = True) -> np.ndarray:
    """Summarise an array or plain data in 128 bits, as two int64; equal for equal values.

    Args:
        value: An array, or something whose repr says all.
        contents: Whether an array's rows count, or its dtype and the shape of a row alone.
    """
    state = hashlib.blake2b(digest_size=16)
    if isinstance(value, np.ndarray):
        shape = value.shape if contents else value.shape[1:]
        state.update(f"{value.dtype.str} {shape}".encode())
        if contents:
            state.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
    else:
        state.update(repr(value).encode())
    return np.frombuffer(state.digest(), np.int64)


def check_equal(replicator: Replicator, what: str, digests: Mapping[str, np.ndarray]) -> None:
    """Compare what ranks have by its digests.

    Args:
        replicator: Knows the ranks.
        what: Who got it: "fit".
        digests: By name; the names are the same on every rank.

    Raises:
        MismatchError: They differ; the message says which one, and on which ranks. On all ranks.
    """
    communicator = replicator.communicator
    if communicator is None or communicator.size == 1:
        return
    mine = np.concatenate(list(digests.values()))
    everyones = np.asarray(communicator.all_gather(mine)).reshape(communicator.size, -1, 2)
    for index, name in enumerate(digests):
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, pair in enumerate(everyones[:, index].tolist()):
            groups.setdefault((pair[0], pair[1]), []).append(rank)
        if len(groups) > 1:
            raise MismatchError(_disagreement(communicator.rank, what, name, list(groups.values())))


def _disagreement(rank: int, what: str, name: str, groups: Sequence[Sequence[int]]) -> str:
    usual, *others = sorted(groups, key=len, reverse=True)
    listed = ", ".join(str(r) for r in sorted(r for group in others for r in group))
    agree = ", ".join(str(r) for r in usual)
    return (
        f"{what} on rank {rank}: {name} is not the same on all ranks: that of rank {listed} "
        f"differs from that of rank {agree}; {_REMEDIES.get(name, _SAME_ARRAYS)}"
    )


def everyones(replicator: Replicator, values: Sequence[int]) -> np.ndarray:
    """Gather a few integers of every rank, as `(ranks, n)`."""
    mine = np.asarray(values, np.int64)
    if replicator.communicator is None:
        return mine[None]
    return np.asarray(replicator.communicator.all_gather(mine)).reshape(-1, len(mine))


def gather_rows(
    replicator: Replicator, rows: np.ndarray, counts: Sequence[int]
) -> list[np.ndarray]:
    """Give every rank all ranks' rows, bit by bit as they are.

    Args:
        replicator: Knows the ranks.
        rows: This rank's, `(counts[rank], …)`.
        counts: How many rows each rank brings.

    Returns:
        By rank, `(counts[rank], …)`.
    """
    communicator = replicator.communicator
    if communicator is None or communicator.size == 1:
        return [rows]
    # Members contribute equal lengths, and bytes travel as int64 whatever the dtype: pad to both.
    width = rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
    words = -(-max(counts) * width // 8)
    mine = np.zeros(words * 8, np.uint8)
    mine[: rows.nbytes] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    found = np.asarray(communicator.all_gather(mine.view(np.int64)))
    parts = found.view(np.uint8).reshape(communicator.size, -1)
    return [
        part[: count * width].view(rows.dtype).reshape(count, *rows.shape[1:])
        for part, count in zip(parts, counts, strict=True)
    ]
