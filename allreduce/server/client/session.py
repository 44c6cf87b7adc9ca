"""A client of a cluster: runs functions on its tasks, through one of them as the master."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import allreduce.errors as errors
from allreduce import settings
from allreduce.cluster.spec import ClusterSpec, is_address, parse_task
from allreduce.devices.integers import switch
from allreduce.devices.options import start_logging
from allreduce.errors import (
    PeerLostError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)
from allreduce.events import logger
from allreduce.graph.core.node import Graph
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.tensor import ConcreteTensor
from allreduce.graph.passes.prune import prune
from allreduce.graph.trace import output_structure
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.output_structure import OutputStructure
from allreduce.graph.trace.signature import Arguments, take_apart
from allreduce.graph.trace.trace import HOST, Trace, check_outside, recording
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.program_check import call
from allreduce.graph.update.update import UpdateRule
from allreduce.keywords import Refusing, explain
from allreduce.server.client.requests import Requests, raise_failure
from allreduce.server.protocol import task_pb2 as pb
from allreduce.server.protocol.channel import DEAD_SECONDS, Answer, Channel
from allreduce.server.protocol.connect import Peer, secret_of
from allreduce.server.protocol.encode import configured, encode
from allreduce.server.protocol.frames import Frame

# The master waits up to the timeout for tasks, then as long for their answers; beyond that, it
# connects to them.
_REGISTERING_SECONDS = 10.0
_SCHEME = "grpc://"
_POLL_SECONDS = 0.05  # of waiting for one task, until the client looks at the others


@dataclass(frozen=True, slots=True)
class _Part:
    """A task's part of a program.

    Attributes:
        feeds: The program's inputs that the task reads.
        fetches: The program's outputs that the task returns.
    """

    channel: Channel
    feeds: tuple[int, ...]
    fetches: tuple[int, ...]


@dataclass(slots=True)
class _Program:
    """A function that is registered with the cluster, for one signature.

    Attributes:
        rules: The optimizers it applies, and their settings when it was registered.
    """

    returned: OutputStructure
    handle: str
    parts: list[_Part]
    rules: list[tuple[UpdateRule, str]]

    @property
    def is_current(self) -> bool:
        """Whether all tasks still have it, with the optimizers' settings of now."""
        for part in self.parts:
            if part.channel.ended:
                return False
        return not self.rules or all(configured(rule) == before for rule, before in self.rules)


@dataclass(slots=True)
class _Function:
    """A function's programs, by signature.

    Attributes:
        like: The latest call's arguments, without values, for quick comparison.
    """

    programs: dict[Any, _Program] = field(default_factory=dict)
    like: Arguments | None = None
    steps: int = 0


class Session(Refusing):
    """Runs functions on the tasks of a cluster.

    The first call of a function with new shapes traces it here and registers its graph with the
    master, which splits it by task; a step is then one message to each of these tasks.

    Args:
        target: The master's address: "grpc://host:port", any task of the cluster.
        secret: The cluster's secret; by default `ALLREDUCE_SECRET`.
        timeout: Seconds to wait for tasks that are not up yet, and for a step; by default
            `ALLREDUCE_TIMEOUT`, or 300.
        is_chief: Whether this client gives initial values to variables that have none. Others wait
            until the chief has done so.

    Attributes:
        cluster: The cluster, as the master describes it.

    Raises:
        UsageError: The target is not an address of this form.
        TimeoutError: No task answers there in time.
        JoinError: The task has another secret, or the server there is no task.
    """

    def __init__(
        self,
        target: str,
        *,
        secret: str | bytes | None = None,
        timeout: float | None = None,
        is_chief: bool = True,
        _given_up: threading.Event | None = None,
    ) -> None:
        address = str(target).removeprefix(_SCHEME)
        if not (str(target).startswith(_SCHEME) and is_address(address)):
            raise UsageError(f"a session's target is 'grpc://host:port', not {target!r}")
        start_logging()
        read = settings.load()
        self._secret = secret_of(secret)
        self._timeout = read.timeout if timeout is None else settings.check("TIMEOUT", timeout)
        self._is_chief = switch("is_chief", is_chief)
        self._name = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._master = Peer(address, self._secret, self._timeout, closed=_given_up)
        self.cluster = ClusterSpec(self._master.hello.cluster)
        self._requests = Requests(self._name, self._secret, self._timeout)
        self._functions: dict[Any, _Function] = {}
        self._created: dict[str, str] = {}  # variables that had values, and their tasks
        self._turn = threading.RLock()
        self._closed = False

    @explain()
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function as one step on the cluster; blocks until it has ended.

        Args:
            fn: A function of tensors, with or without `ar.function`. `ar.device` inside it names
                the tasks' devices; operators without one run near their inputs, or on the master.
            args: A tuple or list of arrays and Python values.
            kwargs: The same, by name.

        Returns:
            The function's result, with an array for each tensor.

        Raises:
            PeerLostError: A task was lost.
            TimeoutError: A task is not up, or has not answered in time.
            DeviceError: The cluster has no such task or device.
            UsageError: The arguments do not fit the function's parameters.
            Exception: The error of an operator, with the task's traceback as a note.
        """
        check_outside("session.run", "call the function itself there")
        if not callable(fn):
            raise UsageError(
                f"{users_line()}: session.run takes a function, not {type(fn).__name__} {fn!r:.60}"
            )
        if not isinstance(args, list | tuple):
            raise UsageError(
                f"{users_line()}: session.run takes the arguments as a tuple, args=(x,), not as "
                f"{type(args).__name__}"
            )
        with self._turn:
            self._check()
            plain = getattr(fn, "python_function", fn)
            function = self._functions.get(plain)
            if function is None:
                function = self._functions[plain] = _Function()
            arguments = take_apart((tuple(args), dict(kwargs or {})), 1, function.like)
            if function.like is None or function.like.key is not arguments.key:
                function.like = arguments.without_values()
            function.steps += 1
            program = function.programs.get(arguments.key)
            if program is None or not program.is_current:
                if program is not None:
                    self._release(program)
                program = function.programs[arguments.key] = self._register(plain, arguments)
            results = self._step(program, arguments, function.steps)
        return program.returned.rebuild(iter(results))

    @explain()
    def read(self, variable: Variable) -> np.ndarray:
        """Return a copy of a variable's value on its task.

        Raises:
            UsageError: The task has no value of it.
        """
        task = self._task_of(variable)
        request = Frame(pb.READ, pb.Description(names=[variable.name]))
        return self._ask(task, request)[1][0]

    @explain()
    def assign(self, variable: Variable, value: Any) -> None:
        """Set a variable's value on its task, which creates it if it has none.

        Raises:
            UsageError: The value has another shape than the variable, or is not numeric.
        """
        task = self._task_of(variable)
        array = np.asarray(as_tensor(value), variable.dtype)
        if array.shape != variable.shape:
            raise UsageError(
                f"{users_line()}: variable {variable.name!r} has shape {variable.shape}; a value "
                f"of shape {array.shape} cannot be assigned to it"
            )
        self._ask(task, Frame(pb.ASSIGN, pb.Description(names=[variable.name])), [array])
        self._created[variable.name] = task

    @explain()
    def tasks(self) -> dict[str, bool]:
        """Return for each task of the cluster whether it answers the master.

        A lost task has 2 s to answer, and a connected one, which may have been stopped, 6 s.

        Raises:
            PeerLostError, TimeoutError: The master does not answer within 6 s.
        """
        self._check()
        self._requests.channel(self._master.name, self._master.address, DEAD_SECONDS)
        reply, _ = self._ask(self._master.name, Frame(pb.TASKS))
        pairs = (each.rpartition("=") for each in reply.about.names)
        return {task: bool(int(lives)) for task, _, lives in pairs}

    @property
    def generation(self) -> int:
        """The number of the master's process; one that is started in its place has another."""
        return self._master.hello.generation

    def ask_generation(self) -> int:
        """Ask the master for `generation`.

        Raises:
            TimeoutError: It does not answer within 6 s.
        """
        self._master.greet(DEAD_SECONDS)
        return self.generation

    def close(self) -> None:
        """End the session; the tasks forget its graphs, and keep the variables."""
        self._closed = True
        self._requests.close()
        self._master.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise errors.ClosedError("[server] the session is closed; make a new one")

    # --- registering ---

    def _register(self, fn: Callable[..., Any], arguments: Arguments) -> _Program:
        graph, returned = _trace(fn, arguments)
        variables = _variables(graph)
        rules = list(
            {
                id(n.attrs["rule"]): n.attrs["rule"] for n in graph.nodes if "rule" in n.attrs
            }.values()
        )
        for rule in rules:
            if rule.gradient_accumulation > 1:
                raise UnsupportedError(
                    f"{type(rule).__name__}(gradient_accumulation={rule.gradient_accumulation}): "
                    "sessions do not accumulate gradients over steps; leave the option out, and "
                    "pass the rows of all micro-batches to one step"
                )
        request = pb.RegisterGraphRequest(
            client=self._name, graph=encode(graph), timeout=self._timeout
        )
        timeout = 2 * self._timeout + _REGISTERING_SECONDS
        reply = self._master.call("RegisterGraph", request, timeout)
        if reply.HasField("failure"):
            raise_failure(reply.failure)
        settled = [(rule, configured(rule)) for rule in rules]
        program = _Program(returned, reply.handle, [], settled)
        try:
            for each in reply.parts:
                channel = self._requests.channel(each.task, each.address)
                program.parts.append(_Part(channel, tuple(each.feeds), tuple(each.fetches)))
            self._create({each.task: list(each.missing) for each in reply.parts}, variables)
        except BaseException:
            self._release(program)
            raise
        return program

    def _create(self, missing: Mapping[str, list[str]], variables: Mapping[str, Variable]) -> None:
        """Give initial values to new variables, or wait until the chief has."""
        lost = [(n, task) for task, names in missing.items() for n in names if n in self._created]
        if lost:
            raise PeerLostError(
                f"[server] {lost[0][1]} has restarted, and the values of variables "
                f"{[name for name, _ in lost]} are gone; set them with session.assign(variable, "
                "value), from a checkpoint or from variable.initial, and run the step again"
            )
        for task, names in missing.items():
            if names and self._is_chief:
                values = [_initial(variables[name]) for name in names]
                request = Frame(pb.ASSIGN, pb.Description(names=names, if_missing=True))
                self._ask(task, request, values)
            elif names:
                self._await(task, names)
            self._created.update(dict.fromkeys(names, task))
        for name, variable in variables.items():
            if variable.device is not None and name not in self._created:
                self._created[name] = self._task_of(variable)

    def _await(self, task: str, names: list[str]) -> None:
        """Wait until all of some variables have values."""
        deadline = time.monotonic() + self._timeout
        logger.info("[server] waiting for the chief to initialise %s on %s", names, task)
        while True:
            try:
                self._ask(task, Frame(pb.READ, pb.Description(names=names)))
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"[server] the chief has not initialised {names} on {task} within "
                        f"{self._timeout:g} s; is a client with is_chief=True running?"
                    ) from None
                time.sleep(0.1)

    def _task_of(self, variable: Variable) -> str:
        """Return the task that holds a variable."""
        if not isinstance(variable, Variable):
            raise UsageError(
                f"{users_line()}: expected an ar.Variable, not {type(variable).__name__} "
                f"{variable!r:.40}"
            )
        place = variable.place
        if place.job is None:
            raise UsageError(
                f"{users_line()}: variable {variable.name!r} belongs to no task of the cluster; "
                'make it under ar.device("/job:…/task:…")'
            )
        self.cluster.address(place.job, place.task or 0)
        return f"/job:{place.job}/task:{place.task or 0}"

    def _ask(
        self, task: str, frame: Frame, arrays: Sequence[np.ndarray] = ()
    ) -> tuple[Frame, Sequence[np.ndarray]]:
        """Send one request to a task; returns the answer."""
        self._check()
        return self._requests.ask(task, self.cluster.address(*parse_task(task)), frame, arrays)

    def _release(self, program: _Program) -> None:
        for part in program.parts:
            with contextlib.suppress(PeerLostError):  # its parts are gone with it
                part.channel.send(Frame(pb.RELEASE, pb.Description(handle=program.handle)))

    # --- steps ---

    def _step(self, program: _Program, arguments: Arguments, step: int) -> list[Any]:
        about = pb.Description(handle=program.handle, rows=(arguments.rows or (1,))[0])
        feeds = arguments.feeds
        sent: list[tuple[_Part, Answer]] = []
        try:
            for part in program.parts:
                arrays = [feeds[i][0] for i in part.feeds]
                sent.append((part, part.channel.request(Frame(pb.RUN, about, step=step), arrays)))
            self._await_all(sent)
        except BaseException as error:
            self._abort(program, step, error)
            if isinstance(error, PeerLostError) or any(answer.has_failed for _, answer in sent):
                self._raise_cause(sent, error)
            raise
        results: list[Any] = [None] * len(program.returned.rows_per_sample)
        for part, answer in sent:
            for index, array in zip(part.fetches, answer.arrays, strict=True):
                results[index] = ConcreteTensor(array, HOST)
        return results

    def _await_all(self, sent: Sequence[tuple[_Part, Answer]]) -> None:
        """Wait for the answers of all tasks.

        Raises:
            Exception: What one of them has failed with, or a TimeoutError.
        """
        deadline = time.monotonic() + self._timeout
        pending = list(sent)
        while pending:
            left = deadline - time.monotonic()
            part, answer = pending[0]
            if part.channel.wait(answer, min(left, _POLL_SECONDS)) or left <= 0:
                if not answer.came or answer.has_failed:
                    self._requests.check(part.channel, answer)
                del pending[0]
                continue
            for part, answer in pending[1:]:  # the first may wait for one that has failed
                if part.channel.wait(answer, 0.0):
                    self._requests.check(part.channel, answer)

    def _abort(self, program: _Program, step: int, error: BaseException) -> None:
        """Tell all tasks that a step has failed, so that none waits for another."""
        why = f"{type(error).__name__}: {error}"
        for part in program.parts:
            about = pb.Description(handle=program.handle, error=why)
            with contextlib.suppress(PeerLostError):  # it needs none
                part.channel.send(Frame(pb.ABORT, about, step=step))

    def _raise_cause(self, sent: Sequence[tuple[_Part, Answer]], first: BaseException) -> None:
        """Wait for all tasks to end a step that failed on one; raise what ended the others."""
        for part, answer in sent:
            try:
                self._requests.result(part.channel, answer)
            except (PeerLostError, TimeoutError):
                continue
            except Exception as error:
                if isinstance(first, PeerLostError):
                    raise error from None
                return


def _trace(fn: Callable[..., Any], arguments: Arguments) -> tuple[Graph, OutputStructure]:
    trace = Trace(1)
    with recording(trace):
        args, kwargs = arguments.placeholders(trace)
        returned, outputs = output_structure.take_apart(call(fn, args, kwargs))
    return prune(trace.finish(outputs)), returned


def _variables(graph: Graph) -> dict[str, Variable]:
    """Return a graph's variables by name."""
    found: dict[str, Variable] = {}
    for node in graph.nodes:
        read = node.attrs.get("variable")
        for each in (*(() if read is None else (read,)), *node.attrs.get("changes", ())):
            if found.setdefault(each.name, each) is not each:
                raise UsageError(f"two variables of the step have the name {each.name!r}")
            if each.place.job is None:
                raise UsageError(
                    f"{node.source}: variable {each.name!r} belongs to this process, not to the "
                    'cluster; make it under ar.device("/job:…/task:…")'
                )
    return found


def _initial(variable: Variable) -> np.ndarray:
    return variable.storage[0] if variable.initial is None else variable.initial
