"""Ranks of a replicator: their numbers, checks, and exchanges outside of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np

from allreduce import comm
from allreduce.cluster.process import traces
from allreduce.comm import Communicator
from allreduce.errors import AllreduceError, ClosedError, MismatchError, UsageError, everywhere
from allreduce.graph.replicate.owner import default_replicator
from allreduce.graph.replicate.replicator import Replicator


def rank_of(replicator: Replicator) -> int:
    """Return this process's rank; without a communicator its number among the tasks."""
    return replicator.communicator.rank if replicator.communicator else replicator.task_index


def size_of(replicator: Replicator) -> int:
    """Return the number of ranks."""
    return replicator.communicator.size if replicator.communicator else 1


def name_rank(error: BaseException, communicator: Communicator | None, what: str) -> None:
    """Prefix an error with the call and the rank, if there are several ranks.

    Args:
        error: Changed only if it is this library's and names no rank yet.
        communicator: The communicator with one member per rank.
        what: The user's call: "fit".
    """
    if communicator is None or communicator.size == 1 or not isinstance(error, AllreduceError):
        return
    here = f"rank {communicator.rank}"
    if not re.search(rf"{here}\b", str(error)):  # rank 1's may speak of rank 10
        error.args = (f"{what} on {here}: {error}", *error.args[1:])


@contextmanager
def naming_rank(replicator: Replicator, what: str) -> Iterator[None]:
    """Prefix errors of the block, which must not communicate, with the call and the rank."""
    try:
        yield
    except AllreduceError as error:
        name_rank(error, replicator.communicator, what)
        raise


def check_world(replicator: Replicator, what: str) -> None:
    """Check that the replicator includes all ranks, and is still usable.

    Raises:
        UsageError: It is the default one, but there are several processes.
        ClosedError: Its communicator is closed, or an error has ended its steps.
    """
    if replicator is not default_replicator():
        communicator = replicator.communicator
        if communicator is not None and communicator.closed:
            raise ClosedError(
                f"{what} on rank {communicator.rank}: the communicator of {replicator!r} is "
                "closed; make a new strategy, and the model in its scope"
            )
        replicator.check_not_over()
        return
    world = comm.world()
    if world.size > 1:
        raise UsageError(
            f"{what} on rank {world.rank} of {world.size}: the model was made without a strategy, "
            "so every process would work by itself; make it, or load it, inside `with "
            "ar.MultiWorkerMirroredStrategy().scope():`"
        )


def gather_integers(replicator: Replicator, what: str, values: Sequence[int]) -> np.ndarray:
    """All-gather a few integers, as `(ranks, n)`; `what` names them in errors."""
    mine = np.asarray(values, np.int64)
    if replicator.communicator is None:
        return mine[None]
    return comm.exchange(replicator.communicator, what, mine)


def gather_texts(replicator: Replicator, what: str, text: str) -> list[str]:
    """All-gather a text, by rank; `what` names it in errors."""
    assert replicator.communicator is not None, "one rank alone asks nobody"
    return [str(each) for each in comm.exchange_plain(replicator.communicator, what, text)]


def raise_together(replicator: Replicator, where: str, error: Exception | None) -> NoReturn:
    """Raise what some rank has raised: there as it is, elsewhere with that rank's traceback.

    A traceback of this library's frames alone is left out: the message says it all.

    Args:
        replicator: The replicator of the ranks, all of which call this.
        where: The place: "batch 3", "Mine.on_epoch_end".
        error: This rank's error; None if it has none.
    """
    own = "" if error is None else _written(error)
    texts = gather_texts(replicator, f"the error in {where}", own)
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    raise everywhere(
        MismatchError(f"rank {rank_of(replicator)}: {where} raised on rank {rank}:{text.rstrip()}")
    )


def _written(error: Exception) -> str:
    if isinstance(error, AllreduceError) and traces.users_line(error) is None:
        return f" {type(error).__name__}: {error}"
    return f"\n{traces.text(error)}"


def gather_rows(replicator: Replicator, rows: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """All-gather rows, bit for bit, and return those of all ranks, by rank.

    Args:
        rows: This rank's rows, `(counts[rank], …)`.
        counts: The number of rows of each rank.
    """
    communicator = replicator.communicator
    if communicator is None or communicator.size == 1:
        return rows
    width = rows.itemsize * math.prod(rows.shape[1:])
    data = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), width)  # of any dtype
    found = comm.exchange(communicator, "rows of results", data, counts)
    return np.frombuffer(found, rows.dtype).reshape(len(found), *rows.shape[1:])
