"""The rendezvous: where a send leaves a value and its receive finds it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from allreduce.errors import TimeoutError


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
        """


class LocalRendezvous(Rendezvous):
    """Between the devices of one process."""

    def __init__(self) -> None:
        self._values: dict[Key, np.ndarray] = {}
        self._changed = threading.Condition()

    def send(self, key: Key, value: np.ndarray) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def receive(self, key: Key, timeout: float) -> np.ndarray:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(
                    f"nothing was sent from {key.source} to {key.destination} within {timeout:g} s "
                    f"(edge {key.edge}, step {key.step})"
                )
            return self._values.pop(key)
