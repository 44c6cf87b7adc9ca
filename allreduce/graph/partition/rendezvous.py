"""The rendezvous: passes values from sends to receives."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from allreduce.errors import PeerLostError, TimeoutError


@dataclass(frozen=True, slots=True)
class Key:
    """The key of one transfer in one step."""

    generation: int
    step: int
    edge: int
    source: str
    destination: str


class Rendezvous(ABC):
    """Passes values from sends to receives.

    Attributes:
        copies: Whether `send` has copied a value for another task when it returns.
    """

    copies = False

    @abstractmethod
    def send(self, key: Key, value: np.ndarray) -> None:
        """Send a value; never blocks. The value must not change until it is received."""

    def reserve(self, destination: str, nbytes: int) -> np.ndarray | None:  # noqa: ARG002
        """Return bytes of memory in which a value for a device need not be copied by `send`.

        They may be used until nothing refers to them. By default there are none: None.
        """
        return None

    @abstractmethod
    def receive(self, key: Key, timeout: float) -> np.ndarray:
        """Receive a value, waiting at most `timeout` seconds.

        Raises:
            TimeoutError: Nothing was sent with this key.
            PeerLostError: An error elsewhere has ended the step; it is the cause.
        """

    @abstractmethod
    def abort(self, generation: int, step: int, cause: BaseException) -> None:
        """End a step: its receives raise, now and later, and unreceived values are dropped."""


class LocalRendezvous(Rendezvous):
    """A rendezvous between the devices and tasks of one process."""

    def __init__(self) -> None:
        self._values: dict[Key, np.ndarray] = {}
        self._aborted: dict[tuple[int, int], BaseException] = {}
        self._changed = threading.Condition()

    def send(self, key: Key, value: np.ndarray) -> None:
        with self._changed:
            if (key.generation, key.step) not in self._aborted:
                self._values[key] = value
                self._changed.notify_all()

    def receive(self, key: Key, timeout: float) -> np.ndarray:
        step = key.generation, key.step
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self._values or step in self._aborted, timeout
            ):
                raise TimeoutError(
                    f"nothing was sent from {key.source} to {key.destination} within {timeout:g} s "
                    f"(edge {key.edge}, step {key.step})"
                )
            if step in self._aborted:
                cause = self._aborted[step]
                raise PeerLostError(
                    f"{key.destination} waits for {key.source}, but step {key.step} was ended by "
                    f"{type(cause).__name__}: {cause}"
                ) from cause
            return self._values.pop(key)

    def abort(self, generation: int, step: int, cause: BaseException) -> None:
        with self._changed:
            self._aborted.setdefault((generation, step), cause)
            for key in [k for k in self._values if (k.generation, k.step) == (generation, step)]:
                del self._values[key]
            self._changed.notify_all()

    def forget(self, generation: int, step: int) -> None:
        """Drop what is left of a step that has ended, and its error."""
        if not (self._values or self._aborted):
            return
        with self._changed:
            self._aborted.pop((generation, step), None)
            for key in [k for k in self._values if (k.generation, k.step) == (generation, step)]:
                del self._values[key]
