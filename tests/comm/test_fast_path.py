"""The fast path of synchronous calls: the same results and errors as the slow one, and safe."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.comm.calls import call_site
from allreduce.comm.transports.shared import transport as shared
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from tests.harness import run_threads

COUNT = 50_000
SWAPPED = np.dtype(ml_dtypes.bfloat16).newbyteorder("S")

Outcome = tuple[str, Any]


def _outcome(method: Callable[..., Any], *values: Any, **named: Any) -> Outcome:
    try:
        result = method(*values, **named)
    except (AllreduceError, TypeError) as error:
        return type(error).__name__, str(error).split(" at ")[0]
    if isinstance(result, np.ndarray):
        return f"{result.dtype}{result.shape}", result.tobytes()
    return type(result).__name__, result


def _read_only() -> np.ndarray:
    out = np.zeros(4)
    out.flags.writeable = False
    return out


# A collective, its array, and further arguments.
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "plain": ("all_reduce", (np.arange(4.0),), {}),
    "operator": ("all_reduce", (np.arange(4),), {"op": "max"}),
    "no operator": ("all_reduce", (np.arange(4.0),), {"op": None}),
    "unknown operator": ("all_reduce", (np.arange(4.0),), {"op": "summ"}),
    "operator of another type": ("all_reduce", (np.arange(4.0),), {"op": 3}),
    "mean of integers": ("all_reduce", (np.arange(4),), {"op": "mean"}),
    "sum of truths": ("all_reduce", (np.ones(4, bool),), {}),
    "no axes": ("all_reduce", (np.array(2.5),), {}),
    "nothing": ("all_reduce", (np.empty((0, 3)),), {}),
    "swapped": ("all_reduce", (np.arange(4.0).astype(">f8"),), {}),
    "swapped bfloat16": ("all_reduce", (np.ones(4, SWAPPED),), {}),
    "bfloat16": ("all_reduce", (np.ones(4, ml_dtypes.bfloat16),), {}),
    "dates": ("all_reduce", (np.zeros(2, "datetime64[s]"),), {}),
    "strides": ("all_reduce", (np.arange(12.0).reshape(3, 4).T[::2],), {}),
    "read-only out": ("all_reduce", (np.ones(4),), {"out": _read_only()}),
    "out of another shape": ("all_reduce", (np.ones(4),), {"out": np.zeros(5)}),
    "out of another type": ("all_reduce", (np.ones(4),), {"out": np.zeros(4, np.float32)}),
    "out that is a list": ("all_reduce", (np.ones(4),), {"out": [0.0] * 4}),
    "rows": ("all_gather", (np.arange(6.0).reshape(3, 2),), {}),
    "no rows": ("all_gather", (np.array(1.0),), {}),
    "gather with an operator": ("all_gather", (np.ones(2),), {"op": "sum"}),
    "gather with None for operator": ("all_gather", (np.ones(2),), {"op": None}),
    "shares": ("reduce_scatter", (np.arange(8),), {}),
    "no equal shares": ("reduce_scatter", (np.arange(7),), {}),
    "root": ("broadcast", (np.arange(3),), {"root": 1}),
    "root that is true": ("broadcast", (np.arange(3),), {"root": True}),
    "root of nobody": ("broadcast", (np.arange(3),), {"root": 2}),
    "root of another collective": ("all_gather", (np.arange(3),), {"root": 0}),
    "exchange": ("all_to_all", (np.arange(4),), {}),
    "barrier": ("barrier", (), {}),
    "barrier of an array": ("barrier", (np.ones(3),), {}),
    "barrier with out": ("barrier", (), {"out": np.ones(3)}),
    "barrier with None for operator": ("barrier", (), {"op": None}),
}


def test_both_ways_give_the_same() -> None:
    def call(comm: Communicator) -> list[tuple[str, Outcome, Outcome]]:
        found = []
        for name, (collective, arrays, named) in CASES.items():
            careful = getattr(Communicator, collective).__wrapped__
            quick = getattr(Communicator, collective)
            first, second = (
                _outcome(method, comm, *copy.deepcopy(arrays), **copy.deepcopy(named))
                for method in (quick, careful)
            )
            found.append((name, first, second))
        return found

    for outcomes in run_threads(call, 2):
        for name, quick, careful in outcomes:
            assert quick == careful, name


def test_swapped_bfloat16_is_refused() -> None:
    def call(comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match="all_reduce"):
            comm.all_reduce(np.ones(3, SWAPPED))

    run_threads(call, 2)


class _LateError(Exception):
    pass


@pytest.mark.parametrize(
    ("of", "name"), [(shared.SharedTransport, "finish_fast"), (call_site, "note")]
)
def test_whatever_raises_in_the_middle_leaves_no_array_to_a_step(
    of: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a handler that raises where Python takes over from the native method."""
    original = getattr(of, name)
    dead = threading.Event()

    def raising(*arguments: Any) -> Any:
        monkeypatch.setattr(of, name, original)
        raise _LateError

    def call(comm: Communicator) -> str:
        x = np.ones(COUNT, np.float32)
        if comm.rank == 1:
            dead.wait(25)
            with pytest.raises(PeerLostError, match="a collective was left in the middle"):
                comm.all_reduce(x)
            return "told"
        comm._dispatch.transport._member.fast_seconds = 0.01  # type: ignore[attr-defined]
        with pytest.raises(_LateError):
            comm.all_reduce(x, out=x)
        dead.set()
        with pytest.raises((ClosedError, PeerLostError)):
            comm.barrier()
        assert (x == 1).all()  # it is no longer written to
        return "dead"

    monkeypatch.setattr(of, name, raising)
    assert run_threads(call, 2) == ["dead", "told"]


def test_close_completes_the_call_of_another_thread() -> None:
    closing = threading.Event()

    def call(comm: Communicator) -> float:
        if comm.rank == 1:
            closing.wait(25)
            return float(comm.all_reduce(np.ones(COUNT))[0])
        results: list[float] = []
        thread = threading.Thread(
            target=lambda: results.append(float(comm.all_reduce(np.ones(COUNT))[0]))
        )
        thread.start()
        while comm._dispatch.transport._member.last() is None:  # type: ignore[attr-defined]
            assert thread.is_alive()
        closing.set()
        comm._dispatch.transport.close(drain=True)
        thread.join(25)
        return results[0]

    assert run_threads(call, 2) == [2.0, 2.0]


def test_a_call_made_ready_whose_array_has_changed_is_refused_and_nothing_dies() -> None:
    def call(comm: Communicator) -> float:
        out = np.zeros(3)
        start = comm.all_reduce_init(np.ones(3), out=out)
        out.flags.writeable = False
        with pytest.raises(UsageError, match="a prepared call have changed since"):
            start()
        out.flags.writeable = True
        start().wait()
        return float(out[0])

    assert run_threads(call, 2) == [2.0, 2.0]


def test_a_native_method_is_handled_as_a_function_is() -> None:
    method = Communicator.all_reduce
    assert pickle.loads(pickle.dumps(method)) is method
    assert copy.deepcopy(method) is method
    assert weakref.ref(method)() is method
    assert list(inspect.signature(method).parameters)[:3] == ["self", "x", "op"]
    assert (inspect.getdoc(method) or "").startswith("Combine the members' arrays")


def test_a_subclass_calls_through() -> None:
    class Counting(Communicator):
        calls = 0

        def all_reduce(self, x: Any, *more: Any, **named: Any) -> Any:
            Counting.calls += 1
            return super().all_reduce(x, *more, **named)

    def call(comm: Communicator) -> float:
        comm.__class__ = Counting
        return float(comm.all_reduce(np.ones(3), op="sum")[0])

    assert run_threads(call, 2) == [2.0, 2.0]
    assert Counting.calls == 2


def test_no_python_runs_before_the_method_that_takes_what_is_not_plain() -> None:
    """A signal's handler could raise in it, and be cleared with the error of the buffer."""

    def call(comm: Communicator) -> list[str]:
        called: list[str] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                called.append(frame.f_code.co_name)

        x = np.ones((4, 4))[:, ::2]
        gc.disable()  # garbage of other tests may have finalizers
        sys.setprofile(note)
        try:
            comm.all_reduce(x)
        finally:
            sys.setprofile(None)
            gc.enable()
        return called

    (called,) = run_threads(call, 1)
    assert called[:2] == ["call", "all_reduce"]  # the first explains arguments that do not fit
