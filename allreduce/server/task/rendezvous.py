"""The rendezvous of one graph's parts: local values stay, others go over data connections."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from allreduce.devices.names import DeviceName
from allreduce.errors import PeerLostError
from allreduce.graph.partition.rendezvous import Key, LocalRendezvous, Rendezvous
from allreduce.graph.partition.tasks import task_of_device
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import Channel
from allreduce.server.protocol.frames import Frame

_ENDED_STEPS = 1024  # of which late values are dropped


class RemoteRendezvous(Rendezvous):
    """Passes values between the parts of one registered graph.

    Args:
        handle: The graph's handle, equal on all tasks.
        own: This task.
        channel: Returns the data connection to another task.
    """

    copies = True

    def __init__(
        self, handle: str, own: DeviceName, channel: Callable[[DeviceName], Channel]
    ) -> None:
        self._handle, self._own, self._channel = handle, own, channel
        self._local = LocalRendezvous()
        self._tasks: dict[str, DeviceName] = {}  # of each destination
        self._ended: OrderedDict[int, None] = OrderedDict()  # steps, the latest last
        self._guard = threading.Lock()

    def send(self, key: Key, value: np.ndarray) -> None:
        """Send a value; raises PeerLostError if the destination's task is lost."""
        task = self._task(key.destination)
        if task == self._own:
            self._local.send(key, value)
            return
        about = pb.Description(
            handle=self._handle, edge=key.edge, source=key.source, destination=key.destination
        )
        self._channel(task).send(Frame(pb.TENSOR, about, step=key.step), [value])

    def reserve(self, destination: str, nbytes: int) -> np.ndarray | None:
        task = self._task(destination)
        return None if task == self._own else self._channel(task).reserve(nbytes)

    def _task(self, device: str) -> DeviceName:
        task = self._tasks.get(device)
        if task is None:
            task = self._tasks[device] = task_of_device(DeviceName.parse(device))
        return task

    def deliver(self, frame: Frame, value: np.ndarray) -> None:
        """Take a value that came from another task; drop it if its step has ended."""
        about = frame.about
        with self._guard:
            if frame.step in self._ended:
                return
            key = Key(0, frame.step, about.edge, about.source, about.destination)
            self._local.send(key, value)

    def receive(self, key: Key, timeout: float) -> np.ndarray:
        return self._local.receive(key, timeout)

    def abort(self, generation: int, step: int, cause: BaseException) -> None:
        with self._guard:
            if step not in self._ended:
                self._local.abort(generation, step, cause)

    def end(self, step: int) -> None:
        """Forget a step: its values, and that it was aborted."""
        with self._guard:
            self._ended[step] = None
            if len(self._ended) > _ENDED_STEPS:
                self._ended.popitem(last=False)
            self._local.forget(0, step)


def lost(peer: str, why: str) -> PeerLostError:
    """Return the error for a step that needs a lost task or client."""
    return PeerLostError(f"[server] {peer} is lost: {why}")
