"""Replicas of several processes compare their variables and programs before they share values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from allreduce.cluster.base import ranks_text
from allreduce.comm import Communicator, adopt, exchange, exchange_plain, world
from allreduce.errors import MismatchError, UsageError, everywhere
from allreduce.graph import fingerprint
from allreduce.graph.fingerprint import Fingerprint
from allreduce.graph.naming import own_part
from allreduce.graph.outline import Outline, difference
from allreduce.graph.spec import show
from allreduce.graph.variable import Variable

_NOBODY = -1  # is the rank that lacks something
_REMEDY = "make the same model, and use the same variables, on every rank"

if TYPE_CHECKING:
    from allreduce.graph.arena_plan import Host

Row = tuple[str, tuple[int, ...], str]  # a variable's name, shape and dtype


class Between(Protocol):
    """This process's replicas between two steps."""

    def exchange(self, purpose: str, mine: np.ndarray) -> np.ndarray: ...


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
    compared = [(own_part(name), shape, dtype) for name, shape, dtype in rows]
    differing = differ(communicator, "the step's variables", json.dumps(compared))
    if not len(differing):
        return
    told = exchange_plain(communicator, "the variables of the step", [rank, rows])
    found = _difference(*told[0], *told[int(differing[0])])
    raise everywhere(MismatchError(f"rank {rank}: {found}; {_REMEDY}"))


class Agreement:
    """What all ranks have to mean alike by a step, of which they compare a digest in every run.

    Args:
        program: The step in words.
        joins_rows: Whether it has to be told how many rows all replicas have.
    """

    def __init__(self, program: Outline, joins_rows: bool) -> None:
        self.program = program
        self.joins_rows = joins_rows
        digest = _digest(json.dumps([line.words for line in program]))
        self._row = np.append(digest, _NOBODY)

    def row(self, rank: int, told: bool, brought: int) -> np.ndarray:
        """Give what a member has: the digest, and its rank where it lacks the rows.

        Args:
            rank: This process's.
            told: Whether it has them.
            brought: The digest of what it brings beside the program.
        """
        lacks = self.joins_rows and not told
        if not brought and not lacks:
            return self._row
        row = self._row.copy()
        row[:1] ^= np.array([brought], np.uint64).view(np.int64)
        row[-1] = rank if lacks else _NOBODY
        return row


def check_program(
    communicator: Communicator, rank: int, step: Agreement, told: bool, brought: Fingerprint
) -> None:
    """Compare what the members are about to run; all members call it.

    Args:
        communicator: Has one member per replica.
        rank: This process's, for messages.
        step: This member's.
        told: Whether it has been told how many rows all replicas have.
        brought: Of what its process brings to the step.

    Raises:
        MismatchError: They differ; the message names the first difference. On all members.
        UsageError: A member has not been told what the step has to be. On all members.
    """
    mine = step.row(rank, told, brought.digest)
    found = _exchanged(communicator, "the step", mine)
    if mine[-1] == _NOBODY and found.tobytes() == mine.tobytes() * communicator.size:
        return
    differing = _others(found[:, :-1])
    said = ""
    if len(differing):
        own = [[rank, step.program], brought.told()]
        rows = exchange_plain(communicator, "what ranks have traced", own)
        (first, has), (other, others) = rows[0], rows[int(differing[0])]
        if outlines := difference(*first, *other):
            raise everywhere(MismatchError(f"rank {rank}: {outlines}"))
        said = fingerprint.difference(first[0], has, other[0], others)
    lacking = sorted({int(each) for each in found[:, -1]} - {_NOBODY})
    if not lacking:
        raise everywhere(MismatchError(f"rank {rank}: {said}"))
    raise everywhere(
        UsageError(
            f"rank {rank}: the step gathers the rows of all replicas, and how many there are is "
            f"not known on {ranks_text(lacking)}; make the batches with "
            "strategy.distribute_dataset"
        )
    )


def differ(communicator: Communicator, what: str, text: str) -> np.ndarray:
    """Compare all members' texts by a digest; returns which members' are not the first one's.

    Args:
        communicator: Whose members compare; all of them call it.
        what: Names what is compared; the same on all members.
        text: This member's.
    """
    return _others(_exchanged(communicator, what, _digest(text)))


def differ_between_steps(host: Between, what: str, text: str) -> np.ndarray:
    """As `differ`, of ranks between two steps: one that is in a step is told, and all others too.

    Args:
        host: This process's replicas.
        what: As `differ` takes it.
        text: This rank's.
    """
    return _others(host.exchange(_purpose(what), _digest(text)))


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.int64)


def _exchanged(communicator: Communicator, what: str, mine: np.ndarray) -> np.ndarray:
    return exchange(communicator, _purpose(what), mine)


def _purpose(what: str) -> str:
    return f"a comparison of {what}"


def _others(found: np.ndarray) -> np.ndarray:
    """Return the rows that are not as the first one."""
    return np.flatnonzero((found != found[0]).any(axis=1))


def _difference(rank: int, rows: Sequence[Any], other_rank: int, others: Sequence[Any]) -> str:
    """Say where two ranks' lists of variables differ first."""

    def both(what: str, mine: str, theirs: str) -> str:
        return f"{what} {mine} on rank {rank} but {theirs} on rank {other_rank}"

    for place, (row, other) in enumerate(zip(rows, others, strict=False)):
        (name, shape, dtype), (other_name, other_shape, other_dtype) = row, other
        if own_part(name) != own_part(other_name):
            return both(f"variable {place} of the step is", repr(name), repr(other_name))
        if shape != other_shape:
            return both(f"variable {name!r} has shape", show(shape), show(other_shape))
        if dtype != other_dtype:
            return both(f"variable {name!r} has dtype", dtype, other_dtype)
    longer, count = max((rows, others), key=len), min(len(rows), len(others))
    counts = both("the step has", f"{len(rows)} variables", str(len(others)))
    return f"{counts}, where {longer[count][0]!r} comes next"


def compare(host: Host, step: Agreement, told: bool) -> None:
    """Make sure that ranks mean the same by what they exchange, or assign, in a step.

    Where an optimizer updates variables, `Stamp` does; values that are only exchanged and returned
    could be mixed up without a sign, and variables that are assigned drift apart. In every run, as
    a rank that has traced a step already may meet one that traces it, for another shape, only now.

    Args:
        host: This process's replicas.
        step: What they are about to run.
        told: Whether they have been told how many rows all replicas have.

    Raises:
        MismatchError: Ranks have traced different programs.
        UsageError: Some have not been told what the step has to be.
    """

    def one(index: int) -> None:
        replica = host.replicas[index]
        assert replica.communicator is not None
        check_program(replica.communicator, world().rank, step, told, replica.fingerprint)

    host.on_replicas(one)


def synchronize(host: Host, variables: Sequence[Variable]) -> None:
    """Give every replica the values that replica 0 has, once per variable.

    Raises:
        MismatchError: Ranks have different variables.
    """
    fresh = [variable for variable in variables if variable not in host.shared]
    if host.num_replicas_in_sync > 1 and fresh:
        several_ranks = len(host.devices) < host.num_replicas_in_sync

        def receive(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None
            if several_ranks:  # replicas of one process have the same variables
                check_same(communicator, world().rank, fresh)
            for variable in fresh:
                value = variable.storage[index]
                adopt(communicator, f"the first value of {own_part(variable.name)}", value)

        host.on_replicas(receive)
    host.shared.update(fresh)
