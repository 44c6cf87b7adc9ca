"""The rendezvous: where a send leaves a value and its receive finds it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from allreduce.errors import PeerLostError, TimeoutError


@dataclass(frozen=True, slots=True)
class Key:
    """Names one transfer of one step."""

    generation: int
    step: int
    edge: int
    source: str
    destination: str


class Rendezvous(ABC):
    """Hands values from sends to receives. Between machines it will be another subclass."""

    @abstractmethod
    def send(self, key: Key, value: np.ndarray) -> None:
        """Leave a value; never blocks. The value must not change until it was received."""

    @abstractmethod
    def receive(self, key: Key, timeout: float) -> np.ndarray:
        """Take the value, waiting for it at most `timeout` seconds.

        Raises:
            TimeoutError: Nothing was sent under this key.
            PeerLostError: The step was ended by an error elsewhere, which is its cause.
        """

    @abstractmethod
    def abort(self, generation: int, step: int, cause: BaseException) -> None:
        """End a step: its receives raise, now and later, and what was sent in it is dropped."""


class LocalRendezvous(Rendezvous):
    """Between the devices, and the tasks, of one process."""

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
