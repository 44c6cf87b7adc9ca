"""The transport between threads and processes of one host, over memory that all members map."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allreduce import _native
from allreduce.comm.calls import call_site
from allreduce.comm.calls.call import (
    COLLECTIVES,
    PATHS,
    Array,
    Call,
    digest,
    kind,
    native_words,
    shaped,
)
from allreduce.comm.calls.plan import Plan
from allreduce.comm.failures.reporter import wait_text
from allreduce.comm.transports.native import NativeTransport, NativeWork
from allreduce.comm.transports.shared import memory
from allreduce.comm.transports.shared.failures import SharedFailureReporter, message_word
from allreduce.comm.transports.shared.links import LocalGroup
from allreduce.comm.transports.shared.symmetric import Symmetric
from allreduce.errors import AllreduceError, UsageError
from allreduce.events import logger


class SharedWork(NativeWork[_native.Work]):
    """A started call of the shared transport."""

    def origin(self) -> tuple[int, int]:
        return self.native.peer, self.native.tag


class SharedTransport(NativeTransport[_native.Work]):
    """One member of a communicator whose members share memory."""

    name = "shared"
    wait_priority, closes_together = 1, False
    drives_shared = True
    _reporter: SharedFailureReporter
    _still_shared = ""  # a warning about arrays that others may change after the end

    def __init__(self, local: LocalGroup, index: int, name: str, timeout: float) -> None:
        self._reporter = SharedFailureReporter(local.group, name, index, local.members)
        self._local = local
        self._member = _native.Member(local.group, index)
        self._symmetric = Symmetric(local, self._member, index, self._reporter.where, timeout)
        super().__init__(index, self._reporter, timeout)
        self._member.fast_seconds = self.fast_seconds

    @property
    def inherited(self) -> bool:
        return self._local.group.inherited

    @property
    def native(self) -> _native.Member:
        return self._member

    def finish_fast(self, work: object, x: Array | None) -> None:
        assert isinstance(work, _native.Work)
        self._finish(work, x)

    def start(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> SharedWork:
        return self._launch(self._poster(call, x, out), (x, out), result)

    def bind(
        self, call: Call, x: Array | None, out: Array | None, result: Callable[[], Any]
    ) -> Callable[[], SharedWork]:
        post = functools.partial(self._post_again, self._poster(call, x, out))
        return functools.partial(self._launch, post, (x, out), result)

    def bind_update(
        self, call: Call, gradients: Array, values: Array, update: _native.Update, keep: object
    ) -> Callable[[], SharedWork]:
        note = call_site.note(gradients, values, call.call_text)
        given = (gradients, values, update, note, digest(call.call_text))
        post = functools.partial(self._member.start_update, *given)
        again = functools.partial(self._post_again, post)
        return functools.partial(self._launch, again, given[:2], lambda: (values, update, keep)[0])

    def part_of(self, array: Array, member: int) -> NDArray[np.uint8]:
        group = self._local.group
        return group.part_of(self.index, array.ctypes.data, array.nbytes, member)

    def _post_again(self, post: Callable[[], _native.Work]) -> _native.Work:
        """Start a bound call; post nothing if its arrays have changed."""
        try:
            return post()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self._reporter.where}: the arrays of a prepared call have changed since: {error}"
            ) from None

    def _launch(
        self,
        post: Callable[[], _native.Work],
        arrays: tuple[Array | None, ...],
        result: Callable[[], Any],
    ) -> SharedWork:
        try:
            native = post()
            work = SharedWork(self, native, arrays, result)
            with self._lock:
                self._keep(work)
        except UsageError:
            raise
        except BaseException as error:
            self.abort_interrupted("a start", error)  # the call's arrays are not kept
            raise
        if native.failed:
            self.complete(native, None)
        return work

    def _poster(self, call: Call, x: Array | None, out: Array | None) -> Callable[[], _native.Work]:
        """Return a function that posts a call, with everything prepared."""
        note = call_site.note(x, out, call.call_text or self._counted(call, x, out))
        member = self._member
        if call.tag is not None and call.root is not None:  # a send or recv
            return functools.partial(member.start_message, x, out, call.root, call.tag, note)
        packed = kind(call.collective, call.op, call.root or 0)
        text = digest(call.call_text)
        return functools.partial(
            member.start, packed, x, out, call.counts, call.receives, note, text
        )

    @staticmethod
    def _counted(call: Call, x: Array | None, out: Array | None) -> str:
        """Format a call with unequal shares, which do not fit in a slot."""
        array = x if x is not None else out
        if call.counts is None or array is None:
            return ""
        return shaped(call, call_site.shape_text(array))

    def plan(self, call: Call, x: Array | None, out: Array | None) -> Plan:
        needed = (x, out) if call.collective == "all_reduce" else (x,)
        symmetric = all(array is not None and self._is_symmetric(array) for array in needed)
        size, choices = len(self._local.members), self._local.choices.native
        path, chunk, streams, staging = _native.shared_plan(
            native_words(call), choices, size, symmetric
        )
        return Plan(
            *(str(call), self.name, PATHS[path]),
            chunk=chunk,
            stores="streaming" if streams else "ordinary",
            sent=0,
            staging=staging,
        )

    def _is_symmetric(self, array: Array) -> bool:
        return self._local.group.is_symmetric(self.index, array.ctypes.data, array.nbytes)

    def absent(self, native: _native.Work) -> list[int]:
        return self._local.group.missing(native.seq)

    def _drive(self, native: _native.Work, seconds: float) -> bool:
        return self._member.wait(native, seconds)

    def _waiting(self, native: _native.Work) -> str:
        return self._reporter.waiting(native)

    @contextlib.contextmanager
    def _announced(self, native: _native.Work) -> Iterator[None]:
        if not native.seq & _native.MESSAGE:
            yield
            return
        collective, *_, peer, _ = native.call
        self._local.group.set_message(self.index, message_word(COLLECTIVES[collective], peer))
        yield  # not after an error: the others may still ask
        self._local.group.set_message(self.index, 0)

    def _fail_by_timeout(self, native: _native.Work, waited: float) -> bool:
        missing = [] if native.seq & _native.MESSAGE else self._local.group.missing(native.seq)
        blamed = next((m for m in missing if m != self.index), self.index)
        self._member.give_up(native, blamed, wait_text(waited))
        return native.done

    def _kill(self, reason: str) -> None:
        self._member.abort(reason)
        self._isolate()

    def _error(self, native: _native.Work | None = None, own: Call | None = None) -> AllreduceError:
        self._isolate()
        error = super()._error(native, own)
        if self._still_shared:
            error.add_note(self._still_shared)
        return error

    def _isolate(self) -> None:
        """Make the arrays of failed calls private, at the same addresses with the same values.

        Otherwise a process that is stopped in such a call could write to them when it continues.
        """
        exposed = self._member.exposed()
        if self._still_shared or not exposed:
            return
        try:  # every process may need as much at the same time
            memory.check_available(exposed * len(self._local.links.processes))
            self._member.isolate()
        except OSError as shortage:
            self._still_shared = (
                f"{self._reporter.where}: {exposed} bytes of this rank's comm.empty arrays could "
                f"not be made private ({shortage.strerror}): a rank that is stopped in the failed "
                "call may still change them when it continues; end it, or copy the arrays"
            )
            logger.warning("%s", self._still_shared)

    def _drain(self) -> None:
        last = self._member.last()
        if last is not None:
            self.complete(last, None)

    def _leave(self) -> None:
        self._member.leave()
        self._isolate()
        self._local.leave()

    def close_inherited(self) -> None:
        """In a forked child, close the sockets: their end of file means the parent's end."""
        super().close_inherited()
        self._local.links.close()

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        return self._symmetric.allocate(nbytes, self._carry_out)

    def _carry_out(self, post: Callable[[], _native.Work]) -> None:
        """Start a call and complete it; its caller keeps its arrays alive."""
        try:
            work = post()
            if not self.wait_for(work, self.fast_seconds):
                self._finish(work, None)
        except BaseException as error:
            self.abort_interrupted("a start", error)
            raise

    def _finish(self, native: _native.Work, x: Array | None) -> None:
        """Complete a call that failed or waits long; only now find its call site."""
        self.admit()
        self._member.note(native.seq, call_site.note(x, None))
        self.complete(native, None, self.fast_seconds)
