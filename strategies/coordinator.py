"""ClusterCoordinator: one client that has functions run on the workers of a cluster."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allreduce.strategies.parameter_server import ParameterServerStrategy

from allreduce.cluster.host.waiting import Wait
from allreduce.cluster.spec import own_task
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    PeerLostError,
    TimeoutError,
    UsageError,
)
from allreduce.events import logger
from allreduce.graph import device
from allreduce.graph.core import pytree
from allreduce.keywords import Refusing
from allreduce.server.client.device_setter import device_setter
from allreduce.server.client.session import Session
from allreduce.server.task.server import Server

_LOOK_SECONDS = 0.5


class RemoteValue:
    """The result of a scheduled function, which may not be there yet.

    Args:
        look: Called again and again while `fetch` waits; may end the function with an error.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the function has ended."""
        return self._ended.is_set()

    def fetch(self) -> Any:
        """Wait for the result, and return it.

        Raises:
            Exception: What the function has raised.
            TimeoutError: No worker has come, or come back, in time.
        """
        while not self._ended.wait(_LOOK_SECONDS):  # so that Ctrl-C is noticed
            self._look()
        if self._error is not None:
            raise self._error
        return self._value

    def _set(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self._ended.set()


class ClusterCoordinator(Refusing):
    """Schedules functions on workers, while variables stay on `ps` tasks.

    The coordinator is a task of its own, such as `chief`. Workers run
    `ar.Server().join("chief:0")`. Functions are traced here, and run as steps of sessions: a step
    reads variables from the `ps` tasks and changes them there. Variables that are made in
    `strategy.scope()` after the coordinator are placed on them, by bytes.

    A function whose worker dies is run again on another worker. So it runs at least once, and may
    have changed variables before, as with TensorFlow's class of this name.

    Args:
        strategy: The strategy, of this process.

    Raises:
        UsageError: It is another strategy, or the cluster has no workers besides this task.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        given: Any = strategy
        if not isinstance(given, ParameterServerStrategy):
            kind = type(given).__name__
            raise UsageError(
                f"ClusterCoordinator takes an ar.ParameterServerStrategy(), not {kind}; with other "
                "strategies every process runs the program: use strategy.run"
            )
        self._strategy = strategy
        found = own_task()
        assert found is not None, "the strategy has checked it"
        _, job, number = found
        cluster = strategy.cluster
        self._tasks = [(j, n) for j, n, _ in cluster if j == "worker" and (j, n) != (job, number)]
        if not self._tasks:
            raise UsageError(
                f"ClusterCoordinator on {job}:{number}: the cluster has no workers besides it; "
                "start it with --cluster chief=1,ps=1,worker=2"
            )
        self._server = Server(cluster, job, number)  # workers see by it when this task has ended
        self._queue: deque[tuple[Callable[..., Any], Any, Any, RemoteValue]] = deque()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._refusals: list[AllreduceError] = []  # of workers that are not waited for
        self._absent = [f"{j}:{n}" for j, n in self._tasks]  # workers that are waited for
        self._wait: Wait | None = None  # for the first of them to come
        self._changed = threading.Condition()
        self._tracing = threading.Lock()
        self._closed = threading.Event()
        strategy.place_variables(device_setter(cluster, strategy="bytes"))
        self._threads = [
            threading.Thread(target=self._serve, args=task, name="allreduce-worker", daemon=True)
            for task in self._tasks
        ]
        for thread in self._threads:
            thread.start()

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Have a function run on some worker; returns at once.

        Args:
            fn: A function of arrays, as `Session.run` takes it.
            args: Arrays and Python values.
            kwargs: The same, by name.

        Raises:
            Exception: What a function scheduled before has raised; all that are queued are dropped.
        """
        future = RemoteValue(self._look)
        with self._changed:
            self._check()
            self._queue.append((fn, tuple(args), dict(kwargs or {}), future))
            self._unfinished += 1
            self._changed.notify_all()
        return future

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Raises:
            Exception: What one of them has raised.
            TimeoutError: No worker has come, or come back, in time.
        """
        with self._changed:
            while self._unfinished:
                self._changed.wait(_LOOK_SECONDS)
                self._look()
            self._check()

    def done(self) -> bool:
        """Return whether all scheduled functions have ended; raises as `join` does."""
        with self._changed:
            self._look()
            self._check()
            return not self._unfinished

    def fetch(self, values: Any) -> Any:
        """Wait for the results in a structure of `RemoteValue`s, and return them in its place."""
        return pytree.map_leaves(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, values
        )

    def close(self) -> None:
        """End the workers, which wait for this task; scheduled functions that have not run fail."""
        self._closed.set()
        self._drop_all()
        self._server.close()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        """Raise the error of a function, once; that of the workers each time if none is left."""
        if self._closed.is_set():
            raise ClosedError("the coordinator is closed; make a new one")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if len(self._refusals) == len(self._tasks):
            raise self._refusals[0]

    def _look(self) -> None:
        """Report if no worker is there; after the timeout, end the functions that wait for one."""
        with self._changed:
            if not self._queue or len(self._absent) + len(self._refusals) < len(self._tasks):
                self._wait = None
                return
            self._wait = self._wait or Wait(self._strategy.timeout, repeats=True)
            if self._wait.has_time_left(", ".join(self._absent)):
                return
            self._wait = None
            error = TimeoutError(
                f"[coordinator] {self._strategy.name}: no worker has come within "
                f"{self._strategy.timeout:g} s: start {', '.join(self._absent)}, with "
                f'ar.Server().join("{self._strategy.name}"), or check the cluster\'s addresses'
            )
            self._error = self._error or error
            self._drop(error)

    def _drop_all(self) -> None:
        with self._changed:
            self._drop(ClosedError("the coordinator was closed before the function ran"))
            self._changed.notify_all()

    def _drop(self, error: BaseException) -> None:
        while self._queue:
            self._queue.popleft()[-1]._set(error=error)
            self._unfinished -= 1

    # --- one thread for each worker ---

    def _serve(self, job: str, number: int) -> None:
        """Run functions on one worker; when it is lost, wait for it."""
        name = f"{job}:{number}"
        functions: dict[Any, Callable[..., Any]] = {}
        while not self._closed.is_set():
            try:
                address = self._strategy.cluster.address(job, number)
                timeout = self._strategy.timeout
                with Session(
                    f"grpc://{address}", timeout=timeout, _given_up=self._closed
                ) as session:
                    with self._changed:
                        self._absent.remove(name)
                    try:
                        self._run_all(session, f"/job:{job}/task:{number}/cpu:0", functions)
                    finally:
                        with self._changed:
                            self._absent.append(name)
            except (PeerLostError, TimeoutError) as error:  # it may come later, or again
                logger.warning("[coordinator] %s: %s", name, error)
            except ClosedError:  # while it waited for the worker
                break
            except AllreduceError as error:  # such as another secret: waiting does not help
                with self._changed:
                    self._absent.remove(name)
                    self._refusals.append(error)
                    self._error = self._error or error
                    self._drop(error)
                    self._changed.notify_all()
                return
        self._drop_all()  # what came back from a lost worker meanwhile

    def _run_all(
        self, session: Session, place: str, functions: dict[Any, Callable[..., Any]]
    ) -> None:
        """Run functions until the worker is lost."""
        generation = session.generation
        while True:
            with self._changed:
                while not self._queue and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    return
                work = self._queue.popleft()
            fn, args, kwargs, future = work
            try:
                value = self._run(session, place, functions, fn, args, kwargs)
            except BaseException as error:
                is_lost = isinstance(error, PeerLostError | TimeoutError)
                if is_lost and not _answers(session, generation):
                    logger.warning(
                        "[coordinator] %s is lost; another worker runs its function: %s",
                        *(place.rpartition("/")[0], error),
                    )
                    with self._changed:
                        self._queue.appendleft(work)
                        self._changed.notify_all()
                    return
                self._end(future, error=error)
            else:
                self._end(future, value)

    def _run(
        self,
        session: Session,
        place: str,
        functions: dict[Any, Callable[..., Any]],
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        plain = getattr(fn, "python_function", fn)
        placed = functions.get(plain)
        if placed is not None:
            return session.run(placed, args, kwargs)

        @functools.wraps(plain)
        def placed_on(*args: Any, **kwargs: Any) -> Any:
            with device(place):
                return plain(*args, **kwargs)

        functions[plain] = placed_on
        with self._tracing:  # layers make their variables in the first trace
            return session.run(placed_on, args, kwargs)

    def _end(
        self, future: RemoteValue, value: Any = None, error: BaseException | None = None
    ) -> None:
        future._set(value, error)
        with self._changed:
            self._unfinished -= 1
            if error is not None:
                self._error = self._error or error
                self._drop(error)
            self._changed.notify_all()


def _answers(session: Session, generation: int) -> bool:
    """Return whether a session's worker answers, and is the process that it was."""
    try:
        session.tasks()
        return session.ask_generation() == generation
    except (PeerLostError, TimeoutError):
        return False
