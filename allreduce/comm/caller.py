"""What all calls of a communicator are made with: who calls, and how a call is started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from allreduce.comm.arguments import Prepared
from allreduce.comm.base import Work
from allreduce.comm.checks import Context, Options
from allreduce.comm.stages import Stages


class Caller(ABC):
    """One member, as its calls see it."""

    rank: int
    size: int

    @abstractmethod
    def _context(self, collective: str) -> Context:
        """Return who is calling what; refuses a closed communicator."""

    @abstractmethod
    def _called(self, member: int) -> str:
        """Name a member as people know it: "rank 7 (member 2)"."""

    @abstractmethod
    def _start(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        """Check and start a call."""

    @abstractmethod
    def _start_ready(self, context: Context, ready: Prepared) -> Work:
        """Start a call that has been checked."""

    @abstractmethod
    def _stage(
        self, collective: str, x: Any, options: Options, out: Any = None, whole: Any = None
    ) -> Work:
        """Check and start one of the calls that another is made of, whose turn it is."""

    @abstractmethod
    def _staged(self, context: Context, stages: Stages, async_op: bool) -> Any:
        """Make a call that is made of several; a `Work` with `async_op`."""

    @abstractmethod
    def _queued(self, context: Context, stages: Stages, async_op: bool) -> Work:
        """Start such a call; by itself it goes on with `async_op` only."""

    @abstractmethod
    def _call(self, begin: Callable[[], Work], async_op: bool) -> Any:
        """Start a call, and wait for it if not `async_op`.

        One that a signal's handler ends in between is not left to write to the caller's arrays.
        """

    @abstractmethod
    def _together(self) -> AbstractContextManager[None]:
        """Let no other thread start a call meanwhile."""

    @abstractmethod
    def _send(self, x: Any, dest: int, tag: int) -> Work:
        """Check and start a send."""

    @abstractmethod
    def _receive(self, out: Any, source: int, tag: int) -> Work:
        """Check and start a recv."""

    @abstractmethod
    def _meet(self, typed: str = "") -> Work:
        """Start a barrier, or what the caller typed instead."""
