"""`ar.function`: a Python function as a traced step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from allreduce.errors import UsageError
from allreduce.graph.core import pytree
from allreduce.graph.inspect.step_graph import StepGraph
from allreduce.graph.replicate.owner import current_replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.trace import check_outside, current_trace
from allreduce.graph.update.program_check import name_of
from allreduce.keywords import explain

_TRACED = "a function is traced once per signature, and Python's control flow runs while tracing"
_ELSEWHERE = dict.fromkeys(
    ("autograph", "input_signature", "jit_compile", "reduce_retracing"), f"leave it out: {_TRACED}"
)


class Function:
    """A function of tensors that is traced once per signature and then replayed.

    Called inside another traced function it becomes part of that one. Called directly it runs on
    one replica; `strategy.run` runs it on all.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._is_static = isinstance(fn, staticmethod)
        fn = fn.__func__ if isinstance(fn, staticmethod) else fn
        self.python_function = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        functools.update_wrapper(self, fn)

    @explain()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_trace() is not None:
            return self.python_function(*args, **kwargs)
        if any(isinstance(leaf, PerReplica) for leaf in pytree.leaves((args, kwargs))):
            raise UsageError(
                f"{self.__qualname__} was called with a PerReplica value; call it through "
                "strategy.run(...), which gives each replica its part"
            )
        replicator = current_replicator()
        arguments = replicator.take_apart(self.python_function, args, kwargs)
        return replicator.run_alone(self.python_function, arguments)

    @explain()
    def graph(self, *args: Any, **kwargs: Any) -> StepGraph:
        """Return the graph of a call, as each replica runs it, without running it.

        Under a strategy's scope it is the one that `strategy.run` runs; every rank asks for it.

        Args:
            args: The arguments; only shapes and dtypes of arrays count. Parts of a batch from
                `distribute_dataset` have no fixed number of rows.
            kwargs: Its keyword arguments, likewise.
        """
        check_outside("graph", "ask for it outside")
        replicator = current_replicator()
        arguments = replicator.take_apart(self.python_function, args, kwargs)
        return StepGraph(replicator.graph(self.python_function, arguments))

    def __get__(self, instance: Any, owner: Any = None) -> Function:
        # Made anew at each access, as Python's own methods are: traces are kept by instance.
        if instance is None or self._is_static or not hasattr(self.python_function, "__get__"):
            return self
        return Function(self.python_function.__get__(instance))


@explain(_ELSEWHERE)
def function(fn: Callable[..., Any]) -> Function:
    """Trace a function of arrays once per signature, as one replica's program.

    Shapes, dtypes and Python values of the arguments make the signature; a replica's share of a
    batch counts with a named batch size, so the smaller last batch needs no new trace. Python
    control flow happens while tracing.
    """
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise UsageError(f"ar.function decorates functions, not {type(fn).__name__}")
    if inspect.iscoroutinefunction(fn):
        raise UsageError(f"ar.function: {name_of(fn)} is a coroutine; write def, not async def")
    return Function(fn)
