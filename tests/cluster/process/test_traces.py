"""Chains of causes, and texts of errors."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from allreduce.cluster.process import traces
from allreduce.keywords import explain
from tests.cluster.processes import running


def _fails() -> None:
    raise ValueError("wrong")


def _cleans_up() -> None:
    try:
        _fails()
    except ValueError as error:
        raise RuntimeError("so it ends") from error


def test_causes_are_told_once_each() -> None:
    circle = ValueError("wrong")
    circle.__cause__ = circle
    assert list(traces.causes(circle)) == [circle]
    with pytest.raises(RuntimeError) as caught:
        _cleans_up()
    assert [str(each) for each in traces.causes(caught.value)] == ["so it ends", "wrong"]
    said = traces.text(caught.value)
    assert "in _fails\n" in said
    assert "direct cause" in said
    assert said.endswith("RuntimeError: so it ends\n")


def test_a_syntax_error_is_summed_up_by_its_message_not_by_its_place() -> None:
    with pytest.raises(SyntaxError) as found:
        compile("x = = 1", "train.py", "exec")
    assert traces.summary(found.value).startswith("SyntaxError: invalid syntax")


_TRAINING = """
import os, sys
import numpy as np
import allreduce as ar

class Ready(ar.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            os.write(1, b"ready\\n")

def batches():
    while True:
        yield rows, rows[:, :1]

rows = np.ones((2048, 256), np.float32)
model = ar.nn.Sequential([ar.nn.Dense(1024), ar.nn.Dense(1)])
model.compile(ar.optim.SGD(0.0), "mse")
model.fit(batches(), steps_per_epoch=10**6, callbacks=[Ready()], verbose=0)
"""


def test_ctrl_c_in_a_process_that_trains_alone_shows_the_users_line_only(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_TRAINING)
    with running([sys.executable, str(path)]) as process:
        assert process.line() == "ready"
        time.sleep(0.5)  # the callback has returned
        process.signal(signal.SIGINT)
        result = process.finish(20)
    assert result.code == -signal.SIGINT
    trace = result.err[result.err.index("Traceback") :].splitlines()
    assert f'File "{path}", line 18, in <module>' in trace[1]
    assert "model.fit(" in trace[2]
    assert trace[-1] == "KeyboardInterrupt"
    assert len(trace) <= 7, result.err


def test_an_interrupt_in_the_users_code_keeps_its_place() -> None:
    def users_function() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        explain()(users_function)()
    assert "in users_function\n" in traces.text(caught.value)


def test_a_mistake_in_the_users_code_ends_there() -> None:
    def users_function() -> None:
        ar.ops.matmul(np.ones((2, 3)), np.ones((2, 3)))

    with pytest.raises(ar.UsageError) as caught:
        explain()(users_function)()
    assert caught.traceback[-1].name == "users_function"
