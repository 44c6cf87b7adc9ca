"""A call that is carried out natively: the work that its caller waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from allreduce.comm.calls.array import Array
from allreduce.comm.calls.call import Call
from allreduce.comm.core.transport import Work

if TYPE_CHECKING:
    from allreduce.comm.transports.native import NativeTransport


class Started(Protocol):
    """A call as the native side has it."""

    @property
    def seq(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def unmet(self) -> bool: ...


N = TypeVar("N", bound=Started)


class NativeWork(Work, Generic[N]):
    """A started call; keeps its arrays alive.

    Attributes:
        native: As the native side has it.
        call: The call, where the native side forgets it before it is done.
    """

    call: Call | None = None

    def __init__(
        self,
        transport: NativeTransport[N],
        native: N,
        arrays: tuple[Array | None, ...],
        result: Callable[[], Any],
    ) -> None:
        self._transport = transport
        self._arrays = arrays
        self._result = result
        self.native = native

    @property
    def settled(self) -> bool:
        return self.native.done or self.native.failed

    @property
    def unmet(self) -> bool:
        return self.native.unmet

    def done(self) -> bool:
        if not self.native.done:
            self._transport.go_on()
            self._transport.poll(self.native)
        return self.native.done

    def look(self) -> bool:
        return self.native.done or self._transport.wait_for(self.native, 0.0)

    def pause(self, seconds: float) -> bool:
        """Wait a moment; returns whether it is complete. That it is not is nobody's fault yet.

        Raises:
            AllreduceError: The communicator has failed.
        """
        if not self.native.done and not self._transport.wait_for(self.native, seconds):
            self._transport.poll(self.native)
        return self.native.done

    def absent(self) -> list[int]:
        """Say for which members it waits."""
        return self._transport.absent(self.native)

    def finish(self, timeout: float | None) -> Any:
        if not self.native.done:
            self._transport.complete(self.native, timeout)
        self._transport.forget(self)
        return self._result()
