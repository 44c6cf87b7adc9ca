"""Run the steps of this process's replicas one at a time, and handle their errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import numpy as np

from allreduce.comm.core.locks import owned
from allreduce.devices.names import DeviceName
from allreduce.errors import ClosedError, UsageError, is_interrupt
from allreduce.graph.consistency.rank_exchange import exchange_between_steps
from allreduce.graph.core.scope import users_line
from allreduce.graph.execute.timing import BatchTiming
from allreduce.graph.replicate.local_replicas import LocalReplicas

T = TypeVar("T")

# The steps that the caller is a part of: its thread's, or, in a thread that helps, the asker's.
_steps: ContextVar[tuple[object, ...]] = ContextVar("steps", default=())


class Replicas(LocalReplicas):
    """The replicas of this process, which run one step at a time.

    Attributes:
        fed: The timing of the latest batch that no step has used yet.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName],
        first_replica: int,
        total: int,
        owned: Sequence[Sequence[DeviceName]],
    ) -> None:
        super().__init__(devices, first_replica, total, owned)
        self._running = threading.RLock()  # buffers belong to one step at a time
        self._step: object = None  # the one that runs
        self._stale = False  # whether a dead communicator must still be replaced
        self.fed: BatchTiming | None = None
        self._over = ""  # why they run no steps any more

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Call `work`, which has the replicas to itself; repair them after an error.

        Each step does this, so it makes as few Python calls as possible. It is no context
        manager: these are Python, and a signal's handler that raises as one is left would have it
        hold the lock for as long as the traceback lives.

        Raises:
            UsageError: The caller is in the middle of a step of these replicas.
            ClosedError: They are closed, or an error has ended their communicator for good.
        """
        outer = _steps.get()
        if owned(self._running) or self._step in outer:
            raise UsageError(
                f"{users_line()}: a step of {self!r} was called in the middle of another one, by a "
                "signal's handler or an operation's kernel; call it when that one is over"
            )
        with self._running:
            step = self._step = object()
            try:
                _steps.set((*outer, step))
                if self._threads is not None:
                    self._stop(KeyboardInterrupt())  # which another one may have kept from it
                if not self._spans_ranks:
                    self._renew()
                if self._over:
                    self.check_not_over()
                return work()
            except BaseException as error:
                self._stop(error)
                self._note_end(error)
                raise
            finally:
                self._step = None
                _steps.set(outer)

    def exchange(self, purpose: str, mine: np.ndarray) -> np.ndarray:
        """Gather an array from every rank between two steps; all ranks call this.

        Args:
            purpose: The purpose, in the same words on all ranks.
            mine: This rank's array; of one shape on all ranks.

        Returns:
            `(ranks, …)`.

        Raises:
            MismatchError: A rank makes another call, or is inside a step.
            ClosedError: The replicas cannot run steps any more.
        """
        ranks = self.communicator
        if ranks is None:
            return mine[None]

        def meet() -> np.ndarray:
            members = [each.communicator for each in self._replicas or ()]
            steps = [each for each in members if each is not None]
            return exchange_between_steps(ranks, steps, purpose, mine)

        return self._exclusively(meet)

    def _stop(self, cause: BaseException) -> None:
        """Stop all replicas after a signal handler has raised."""
        if self._threads is None or not self._threads.busy:
            return
        for replica in self._replicas or ():
            assert replica.communicator is not None, "a single replica has no threads"
            reason = f"its step was ended by {cause!r}"
            replica.communicator.abort(reason, interrupted=is_interrupt(cause))
        self._threads.end()
        self._threads = None

    def _renew(self) -> None:
        """Make replicas usable again after one has raised, if all of them live in this process.

        The error has ended their communicator, and memory of a dead one is never used again. An
        interrupted repair is repeated.
        """
        if self._spans_ranks:
            return
        self._stale |= self._dead
        if self._stale:
            self._close_communicators()
            self._forget()
            self._stale = False

    @property
    def _dead(self) -> bool:
        members = [each.communicator for each in self._replicas or ()]
        return any(member is not None and member.dead for member in members)

    def _note_end(self, error: BaseException) -> None:
        """Keep the error of replicas of several ranks: their communicator is not replaced."""
        if self._spans_ranks and self._dead:
            said, more, _ = str(error).partition("\n")
            if more:  # which begins a list
                said = said.rpartition("; ")[0] or said
            told = f": {said}" if said else ""  # an interrupt says nothing
            self._over = self._over or f"{type(error).__name__} has ended a step of it{told}"

    @property
    def is_over(self) -> bool:
        """Whether an error or `close` has ended the replicas."""
        return bool(self._over)

    def check_not_over(self) -> None:
        """Raise an error if an error or `close` has ended the replicas."""
        if self._over:
            raise ClosedError(
                f"{users_line()}: {self!r} runs no steps any more, as {self._over}. Its variables "
                "can still be read and saved; to go on, make another strategy, on every rank, and "
                "in its scope the model, or load it there (if a rank is gone, start the job again)"
            )

    def _forget(self) -> None:
        """Let go of all memory of a dead communicator."""

    def close(self) -> None:
        """End the replicas' threads and communicators; no more steps can run."""
        self._over = "it was closed"
        if self._threads is not None:
            self._threads.end()
            self._threads = None
        self._close_communicators()
