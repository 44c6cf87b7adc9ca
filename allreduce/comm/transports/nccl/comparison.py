"""Compare the members' calls of arrays on GPUs in the background: NCCL does not.

Every member numbers its calls. In a round, all members gather the number of calls that each has
made since the last compared one, and the digests of these. The calls that all have made are then
compared. A member takes part in a round once it has made a call that has not been compared. If two
calls differ, a second exchange gathers their texts, so that all members raise the same error.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.comm.calls.call import MESSAGES, TEXT_BYTES, Call, bounded, digest
from allreduce.comm.calls.call_site import Note, Place, place
from allreduce.comm.calls.call_site import text as site_text
from allreduce.comm.core.transport import PreparedOnDevice, Transport
from allreduce.comm.core.work import Work
from allreduce.comm.failures.mismatch import Side, describe
from allreduce.comm.failures.reporter import build_error
from allreduce.errors import AllreduceError, Finding

_ROUND = 32  # calls that a round compares at most
_ONE_GPU = (
    "a rank has a communicator for each GPU that it calls with, numbered in the order of their "
    "first calls; every rank must call with the GPU of the same one"
)
_TEXT_BYTES = 512  # of a call that differs, with its line in the program


class _Made(NamedTuple):
    calls: tuple[Call, ...]
    factors: tuple[float, ...]
    communicator: int
    place: Place  # of the caller

    @property
    def text(self) -> str:
        return calls_text(self.calls, self.factors, self.communicator)


@functools.lru_cache(maxsize=1024)
def calls_text(calls: tuple[Call, ...], factors: tuple[float, ...], communicator: int) -> str:
    """Format a call, or the calls of a list, with all that must be equal on all members.

    Args:
        calls, factors: Of the arrays.
        communicator: The number of NCCL's communicator, from 0: there is one for each GPU that a
            member calls with.
    """
    first, factor = calls[0], factors[0]
    shown = str(first)
    if first.collective == "all_to_all" and first.counts is not None:
        shown = f"all_to_all({first.dtype}, counts=[...])"  # each member sends its own
    elif len(calls) > 1:
        arrays = ", ".join(f"{each.dtype}[{each.count}]" for each in calls)
        shown = shown.replace(f"{first.dtype}[{first.count}]", f"[{arrays}]", 1)
    if factor != 1.0:
        shown = f"{shown[:-1]}, factor={factor!r})"
    if communicator:
        shown = f"{shown[:-1]}, communicator={communicator})"
    return bounded(shown)


class CallComparison:
    """One member's calls, and their comparison with the others'.

    Args:
        plane: A communicator of its own on the host, used by nothing else.
        group: The communicator's name.
        where: A prefix for messages.

    Attributes:
        made: The number of calls so far.
        compared: The number of those that are known to be equal on all members.
    """

    def __init__(self, plane: Transport, group: str, where: str) -> None:
        self.plane, self._group, self._where = plane, group, where
        self.made = self.compared = 0
        self._calls = deque[_Made]()  # not compared yet
        self._lock = threading.RLock()
        self._round: Work | None = None
        self._differing: int | None = None  # the number of a call that differs, from 0
        self._size = len(plane.members)
        self._mine = np.zeros(1 + _ROUND, np.uint64)
        self._all = np.zeros((self._size, 1 + _ROUND), np.uint64)
        self._own_text = np.zeros(_TEXT_BYTES, np.uint8)
        self._texts = np.zeros((self._size, _TEXT_BYTES), np.uint8)

    def add(self, calls: Sequence[PreparedOnDevice], communicator: int) -> int:
        """Note a call, or a list of calls, before it is enqueued; returns the number of calls.

        Messages are not counted: only two members make them.
        """
        if calls[0].call.collective not in MESSAGES:
            own = tuple(each.call for each in calls), tuple(each.factor for each in calls)
            with self._lock:
                self._calls.append(_Made(*own, communicator, place()))
                self.made += 1
        return self.made

    def advance(self) -> None:
        """Begin or continue a round; does not block.

        Raises:
            MismatchError: Members made different calls.
            PeerLostError: A member died or left before the round was complete.
        """
        with self._lock:
            if self._round is None and self._calls:
                self._begin()
            if self._round is not None and self._round.done():
                self._round.wait()
                self._round = None
                if self._differing is None:
                    self._compare()
                else:
                    raise self._mismatch(self._differing)

    @property
    def differs(self) -> bool:
        """Whether calls are being compared, or have been found to differ."""
        return self._round is not None or self._differing is not None

    def absent(self) -> list[int]:
        """Return the members that have not taken part in the current round."""
        found = getattr(self._round, "absent", None)
        return [] if found is None else [each for each in found() if each != self.plane.index]

    def _begin(self) -> None:
        count = min(len(self._calls), _ROUND)
        self._mine[0] = count
        self._mine[1 : 1 + count] = [digest(self._calls[i].text) for i in range(count)]
        self._round = self._gather(self._mine, self._all, "compare calls")

    def _compare(self) -> None:
        counts, digests = self._all[:, 0].astype(int), self._all[:, 1:]
        common = int(counts.min())
        differs = (digests[:, :common] != digests[0, :common]).any(axis=0)
        equal = int(differs.argmax()) if differs.any() else common
        for _ in range(equal):
            self._calls.popleft()
        self.compared += equal
        if equal < common:
            self._differing = self.compared
            self._tell()

    def _tell(self) -> None:
        """Begin to exchange the texts of the calls that differ."""
        made = self._calls[0]
        first = made.calls[0]
        facts = [first.collective, first.op, first.dtype, first.count, first.root]
        facts.append(made.communicator)
        texts = [made.text, site_text(*made.place)[-TEXT_BYTES:]]
        # In ASCII: JSON would write other characters as six bytes, and the text would be cut.
        shown = [each.encode("ascii", "replace").decode() for each in texts]
        data = json.dumps([*facts, *shown]).encode()
        self._own_text[:] = np.frombuffer(data.ljust(_TEXT_BYTES)[:_TEXT_BYTES], np.uint8)
        self._round = self._gather(self._own_text, self._texts, "name the calls that differ")

    def _gather(self, mine: np.ndarray, everyones: np.ndarray, what: str) -> Work:
        text = f"nccl({what})"
        call = Call(
            "all_gather", None, str(mine.dtype), mine.size, None, self._group, call_text=text
        )
        return self.plane.start(call, mine, everyones, lambda: None)

    def _mismatch(self, number: int) -> AllreduceError:
        """Return the error that names the first call that differs from member 0's."""
        found = [self._side(member) for member in range(self._size)]
        sides, communicators = zip(*found, strict=True)
        other = next((i for i, each in enumerate(sides) if each.call != sides[0].call), -1)
        remedy = "" if communicators[other] == communicators[0] else _ONE_GPU
        what = f"call #{number + 1} on GPUs"
        text = describe(what, sides[0], sides[other], remedy=remedy)
        return build_error(self._where, Finding("mismatch", text))

    def _side(self, member: int) -> tuple[Side, int]:
        """Return a member's call that differs, and the number of its communicator."""
        data: list[Any] = json.loads(self._texts[member].tobytes().decode())
        collective, op, dtype, count, root, communicator, call_text, site = data
        plain = Call(collective, op, dtype, count, root, self._group)
        text = "" if call_text == str(plain) else call_text
        call = Call(collective, op, dtype, count, root, self._group, call_text=text)
        side = Side(str(self.plane.members[member]), call, Note(str(count), site), rank=member)
        return side, communicator
