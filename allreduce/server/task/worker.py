"""A task's variables and its parts of graphs: what a step runs on."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allreduce.devices import logical_devices
from allreduce.devices.names import DeviceName
from allreduce.errors import AllreduceError, UnsupportedError, UsageError
from allreduce.graph.core.host_future import Output
from allreduce.graph.core.spec import Spec
from allreduce.graph.execute.executor import Executor
from allreduce.graph.partition.tasks import task_name
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.replicate.compiled import compile_part
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.replica import Replica, StepInfo
from allreduce.graph.trace.variable import Variable
from allreduce.optim import registry
from allreduce.optim.base import Optimizer
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import Channel
from allreduce.server.protocol.encode import Configuration, Description, decode
from allreduce.server.protocol.frames import Frame
from allreduce.server.task.rendezvous import RemoteRendezvous, lost

_QUICK_SECONDS = 1e-3  # of a step, while which no other thread needs to read


class StaleError(AllreduceError):
    """A graph is not registered here: the task has restarted, or has released it."""


class _TaskHost(Replicator):
    """One replica on this process's devices, under their names in the cluster."""

    def __init__(self, task: DeviceName, guard: threading.Lock) -> None:
        self._task, self._guard = task, guard
        super().__init__()

    @property
    def places(self) -> list[DeviceMap]:
        # CPUs first, where operators run that ask for no kind of device.
        devices = sorted(logical_devices(), key=lambda each: not each.name.on_host)
        names = {
            replace(self._task, kind=each.name.kind, index=each.name.index): each.name
            for each in devices
        }
        return [DeviceMap(next(iter(names)), names)]

    @property
    def replicas(self) -> list[Replica]:
        return [Replica(0, 0, None, self.places[0], guard=self._guard)]  # one for each program


@dataclass(slots=True)
class _Part:
    """A registered part of a graph.

    Attributes:
        tasks: The tasks that the whole graph spans, and their generations.
        waits: Whether it receives values from other tasks.
        running: The steps that are under way.
        seconds: The duration of the latest step.
    """

    executor: Executor
    rendezvous: RemoteRendezvous
    variables: list[Variable]
    tasks: Mapping[str, int]
    waits: bool
    running: set[int] = field(default_factory=set)
    seconds: float = math.inf
    turn: threading.Lock = field(default_factory=threading.Lock)

    def abort(self, cause: BaseException) -> None:
        """End the steps that are under way."""
        for step in list(self.running):
            self.rendezvous.abort(0, step, cause)


class Worker:
    """The variables of a task, and the parts of graphs that are registered with it.

    Args:
        task: This task, as a device name without a device.
        channel: Returns the data connection to another task of a generation.
    """

    def __init__(self, task: DeviceName, channel: Callable[[DeviceName, int], Channel]) -> None:
        self._task, self._channel, self._name = task, channel, task_name(task)
        self._guard = threading.Lock()  # of variables' values
        self._host = _TaskHost(task, self._guard)
        self._variables: dict[str, Variable] = {}
        self._empty: set[str] = set()  # variables that have no value yet
        self._rules: dict[tuple[str, ...], Optimizer] = {}
        self._parts: dict[str, _Part] = {}
        self._registering = threading.Lock()

    @property
    def devices(self) -> list[DeviceName]:
        """This task's devices, under their names in the cluster."""
        return list(self._host.places[0].names)

    def register(self, request: pb.RegisterPartRequest) -> list[str]:
        """Compile a part; returns the names of its variables that have no value yet.

        Raises:
            UnsupportedError: A node is placed on a GPU.
        """
        _check_devices(request.part)
        with self._registering:
            graph = decode(request.part, self._variable, self._rule)
            tasks = dict(request.generations)
            rendezvous = RemoteRendezvous(
                request.handle, self._task, lambda task: self._channel(task, tasks[task_name(task)])
            )
            executor = compile_part(self._host, graph, rendezvous)
            variables = [self._variables[each.name] for each in request.part.variables]
            waits = any(each.op == "receive" for each in graph.nodes)
            made = _Part(executor, rendezvous, variables, tasks, waits)
            self._parts[request.handle] = made
            return [each.name for each in variables if each.name in self._empty]

    def _variable(self, wanted: Description) -> Variable:
        found = self._variables.get(wanted.name)
        if found is None:
            zeros = np.zeros(wanted.spec.shape, wanted.spec.dtype)
            found = Variable(
                zeros, name=wanted.name, trainable=wanted.trainable, replicator=self._host
            )
            self._variables[wanted.name] = found
            self._empty.add(wanted.name)
        if found.spec != wanted.spec:
            raise UsageError(
                f"variable {wanted.name!r} is {found.spec} on {self._name}, where it exists; this "
                f"program describes it as {wanted.spec}"
            )
        return found

    def _rule(self, wanted: Configuration) -> Optimizer:
        """Return the optimizer of some variables; a new configuration changes its settings."""
        made = registry.deserialize(json.loads(wanted.config), {})
        key = (type(made).__name__, *(each.name for each in wanted.variables))
        known = self._rules.setdefault(key, made)
        if known is not made:
            for name in known.hyperparameters:
                setattr(known, name, getattr(made, name))
        return known

    def run(self, frame: Frame, feeds: Sequence[np.ndarray]) -> Sequence[Output]:
        """Run one step of a part.

        Raises:
            StaleError: The part is not registered.
            UsageError: A variable has no value.
            Exception: Whatever an operator raised.
        """
        handle = frame.about.handle
        part = self._part(handle)
        if self._empty:
            empty = [each.name for each in part.variables if each.name in self._empty]
            if empty:
                raise UsageError(f"{self._name} has no value of variables {empty}")
        with part.turn:
            part.running.add(frame.step)
            try:
                if handle not in self._parts:  # it has been released meanwhile
                    self._part(handle)
                began = time.monotonic()
                results = part.executor.run(feeds, StepInfo(frame.about.rows, 0, frame.step), False)
                part.seconds = time.monotonic() - began
                return results
            finally:
                part.running.discard(frame.step)
                part.rendezvous.end(frame.step)

    def is_quick(self, handle: str) -> bool:
        """Return whether a step of a part waits for no other task, and its latest one was short."""
        part = self._parts.get(handle)
        return part is not None and not part.waits and part.seconds < _QUICK_SECONDS

    def _part(self, handle: str) -> _Part:
        part = self._parts.get(handle)
        if part is None:
            raise StaleError(f"{self._name} does not know the graph {handle}")
        return part

    def deliver(self, frame: Frame, value: np.ndarray) -> None:
        """Take a value that another task has sent."""
        part = self._parts.get(frame.about.handle)
        if part is not None:
            part.rendezvous.deliver(frame, value)

    def abort(self, handle: str, step: int, cause: BaseException) -> None:
        """End a step that has failed elsewhere."""
        part = self._parts.get(handle)
        if part is not None:
            part.rendezvous.abort(0, step, cause)

    def lose(self, peer: str, why: str) -> None:
        """End the steps that need a lost task; forget the graphs of a lost client."""
        owned = []
        for handle, part in list(self._parts.items()):
            if handle.rpartition("/")[0] == peer:
                owned.append(handle)
            elif peer in part.tasks:
                part.abort(lost(peer, why))
        self.release(owned, lost(peer, why))

    def release(self, handles: Sequence[str], cause: BaseException | None = None) -> None:
        """Forget graphs, end their steps for a cause, and free their memory."""
        for handle in handles:
            part = self._parts.pop(handle, None)
            if part is not None:
                part.abort(cause or StaleError(f"{self._name} has released the graph {handle}"))
                with part.turn:
                    part.executor.release()

    def read(self, names: Sequence[str]) -> list[np.ndarray]:
        """Copy variables' values.

        Raises:
            UsageError: This task has no such variable, or it has no value.
        """
        with self._guard:
            unknown = [n for n in names if n not in self._variables or n in self._empty]
            if unknown:
                raise UsageError(f"{self._name} has no value of variables {unknown}")
            return [self._variables[name].storage[0].copy() for name in names]

    def assign(self, names: Sequence[str], values: Sequence[np.ndarray], if_missing: bool) -> None:
        """Set variables' values; with `if_missing`, only of those that have none.

        Raises:
            UsageError: A variable has another shape or dtype here.
        """
        with self._registering:
            found = [
                self._variable(Description(name, Spec(value.shape, value.dtype), "", True))
                for name, value in zip(names, values, strict=True)
            ]
            with self._guard:
                for variable, value in zip(found, values, strict=True):
                    if not if_missing or variable.name in self._empty:
                        variable.storage[0][...] = value
                        self._empty.discard(variable.name)


def _check_devices(part: pb.Graph) -> None:
    """Refuse GPUs: values are sent to tasks and clients from the host's memory."""
    for node in part.nodes:
        if node.device and not DeviceName.parse(node.device).on_host:
            raise UnsupportedError(
                f"{node.source}: operator {node.op!r} is placed on {node.device}, but sessions use "
                "the CPUs of tasks only; place it on cpu:0 of that task, or train on GPUs with "
                "ar.MultiWorkerMirroredStrategy"
            )
