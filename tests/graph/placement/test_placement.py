"""Where operations go: scopes, functions as scopes, colocation, kernels, variables, names."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import DeviceName, options
from allreduce.errors import DeviceError, UsageError
from allreduce.events import logger
from allreduce.graph.core import op_table
from allreduce.graph.core.node import Node
from allreduce.graph.core.spec import BATCH
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.placement.placement import PlacementRow, place
from tests.graph.interpret import trace_of


def _names(*texts: str) -> list[DeviceName]:
    return [DeviceName.parse(text).complete() for text in texts]


CPUS = _names("CPU:0", "CPU:1")
GPU = _names("GPU:0")[0]
CLUSTER = [*CPUS, *_names("/job:worker/task:1/CPU:0", "/job:ps/task:0/CPU:0")]


def _where(
    fn: Callable[..., Any],
    *,
    home: DeviceName = CPUS[0],
    available: list[DeviceName] = CLUSTER,
    shape: tuple[Any, ...] = (2,),
) -> dict[str, PlacementRow]:
    """Place a function of one tensor; gives the last row of the log for each operator."""
    _, log = place(trace_of(fn, shape), home, available)
    return {row.op: row for row in log}


@pytest.fixture
def soft() -> Iterator[None]:
    options.set_soft_device_placement(True)
    yield
    options.set_soft_device_placement(False)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Give what is logged, whether or not the library has set up its own handler."""
    logger.addHandler(caplog.handler)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield caplog
    logger.setLevel(level)
    logger.propagate = propagate
    logger.removeHandler(caplog.handler)


def test_nested_scopes_fill_what_inner_ones_leave_open() -> None:
    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/job:worker/task:1"):
            y = ar.ops.exp(x)
            with ar.device("cpu:0"):
                z = ar.ops.log(y)
            with ar.device("/job:ps/task:0/device:CPU:*"):
                return ar.ops.tanh(z)

    found = _where(fn)
    assert found["exp"].device == found["log"].device == CLUSTER[2]
    assert found["tanh"].device == CLUSTER[3]
    assert found["exp"].reason == "ar.device('/job:worker/task:1')"


def test_a_function_chooses_for_each_operation() -> None:
    seen: list[str] = []

    def second(node: Node) -> str | None:
        seen.append(node.op)
        return "CPU:1" if node.op == "exp" else None

    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/job:worker/task:0/CPU:0"), ar.device(second):
            return ar.ops.log(ar.ops.exp(x))

    found = _where(fn)
    assert seen == ["exp", "log"]
    assert found["exp"].device == CPUS[1]
    assert found["log"].device == CPUS[0]
    with ar.device(lambda node: "CPU:1" if node.op == "variable" else None):
        assert ar.Variable(1.0, name="v").device == DeviceName.parse("CPU:1")
        assert ar.ops.exp(1.0).device == CPUS[0]  # type: ignore[attr-defined]
    with ar.device(lambda node: "nowhere"), pytest.raises(DeviceError, match="'nowhere'"):
        ar.ops.exp(1.0)


def test_colocation_wins_over_scopes_around_it_and_loses_to_those_inside() -> None:
    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("CPU:1"):
            y = ar.ops.exp(x)
        with ar.device("/task:1"), ar.colocate_with(y):
            z = ar.ops.log(x)
            with ar.device("/job:ps"):
                return ar.ops.tanh(z)

    found = _where(fn)
    assert (found["log"].device, found["log"].reason) == (CPUS[1], "beside its exp")
    assert found["tanh"].device == CLUSTER[3]


def test_values_are_colocated_outside_of_functions_and_with_variables() -> None:
    with ar.device("CPU:2"):
        y, v = ar.ops.exp(1.0), ar.Variable(np.ones(2, np.float32), name="v")
    with ar.colocate_with(y):
        assert str(ar.ops.log(2.0).device).endswith("CPU:2")  # type: ignore[attr-defined]

    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.colocate_with(v):
            return ar.ops.exp(x)

    found = _where(fn, available=_names("CPU:0", "CPU:1", "CPU:2"))
    assert found["exp"].device == _names("CPU:2")[0]
    kept: list[ar.Tensor] = []

    def leak(x: ar.Tensor) -> ar.Tensor:
        kept.append(x)
        return x

    trace_of(leak, (2,))
    with pytest.raises(UsageError, match="whose trace has ended"):
        ar.colocate_with(kept[0])
    with pytest.raises(UsageError, match="takes a tensor or a variable, not 'CPU:0'"):
        ar.colocate_with("CPU:0")  # type: ignore[arg-type]


def test_what_has_no_kernel_for_a_kind_stays_on_the_cpu_of_its_task() -> None:
    def fn(x: ar.Tensor) -> ar.Tensor:
        y = ar.ops.exp(ar.ops.reshape(x, (1, 2)))
        with ar.device("GPU:0"):
            ar.print(y)  # talks to the host, wherever it is written
        return y

    found = _where(fn, home=GPU, available=[GPU, *reversed(CLUSTER)])
    assert found["placeholder"].device == found["reshape"].device == GPU, "views need no kernel"
    assert found["exp"].device == GPU
    assert found["print"].device == CPUS[1], "the first CPU of the GPU's own task"
    assert found["print"].reason == "print runs on CPUs"

    def there(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/task:1/CPU:0"):
            ar.print(y := ar.ops.exp(x))
        return y

    assert _where(there)["print"].device == CPUS[0], "no scope moves it"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the operators that a test registers."""
    monkeypatch.setattr(op_table, "_TABLE", dict(op_table._TABLE))


def _copied(out: Any, inputs: Any, attrs: Any) -> None:
    del attrs
    out[...] = inputs[0]


def _cpu_only() -> Callable[..., Any]:
    """Register an operator without a kernel for GPUs; all of the library's have one."""
    return ar.register_op("cpu_only", shape=lambda specs, attrs: specs[0], cpu=_copied)


def test_what_has_a_kernel_for_gpus_goes_there(table: None) -> None:
    both = ar.register_op(
        "both_for_a_test", shape=lambda specs, attrs: specs[0], cpu=_copied, cuda=_copied
    )
    cpu_only = _cpu_only()

    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("GPU:0"):
            return both(x)

    found = _where(lambda x: ar.ops.exp(both(x)), home=GPU, available=[GPU, *CPUS])
    assert (found["both_for_a_test"].device, found["exp"].device) == (GPU, GPU)
    without = r'no kernel of cpu_only, so place it with ar.device\("CPU:0"\)'
    with pytest.raises(DeviceError, match=without):  # no silent copy to the host
        _where(lambda x: cpu_only(both(x)), home=GPU, available=[GPU, *CPUS])
    asked = _where(fn, available=[*CPUS, GPU])["both_for_a_test"]
    assert (asked.device, asked.reason) == (GPU, "ar.device('/device:GPU:0')")
    row = op_table.lookup("both_for_a_test")
    assert row.kernel("GPU") is row.cuda
    assert row.kernel("GPU") is not row.kernel("CPU")
    np.testing.assert_array_equal(ar.function(both)(np.ones(3)), np.ones(3))


def test_a_device_that_cannot_do_it_is_an_error_and_soft_placement_warns_once(
    soft: None, table: None, log: pytest.LogCaptureFixture
) -> None:
    cpu_only = _cpu_only()

    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("GPU:0"):
            total: ar.Tensor = cpu_only(x) + cpu_only(2 * x)
            return total

    for _ in range(2):
        found = _where(fn, available=[*CPUS, GPU])
    assert found["cpu_only"].device == CPUS[0]
    assert "soft placement" in found["cpu_only"].reason
    assert log.text.count("which has no kernel of cpu_only") == 1
    options.set_soft_device_placement(False)
    with pytest.raises(
        DeviceError, match=r"cpu_only was placed on .*GPU:0.*no kernel of cpu_only.*CPU:1"
    ):
        _where(fn, available=[*CPUS, GPU])


def test_an_operation_goes_to_the_variable_it_reads() -> None:
    with ar.device("CPU:1"):
        w = ar.Variable(np.ones((2, 2), np.float32), name="w")

    def fn(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/job:ps"):
            y = ar.ops.exp(x)
        with ar.device("/task:1/job:worker"):
            w.assign(w * 2.0)
        return y @ w

    found = _where(fn, shape=(3, 2))
    assert (found["matmul"].device, found["matmul"].reason) == (CPUS[1], "its variable is there")
    # Where the variable is, not where its reader or who changes it is.
    assert found["read"].device == found["assign"].device == CPUS[1]


def test_gradients_are_computed_beside_what_they_are_of() -> None:
    with ar.device("CPU:1"):
        w = ar.Variable(np.ones((2, 2), np.float32), name="w")

    def fn(x: ar.Tensor) -> ar.Tensor:
        hidden = ar.ops.tanh(x * 2.0)
        with ar.device("CPU:1"):
            loss = ar.ops.sum(hidden @ w)
        (gradient,) = ar.gradients(loss, [w])
        return gradient

    placed, _ = place(trace_of(fn, (BATCH, 2)), CPUS[0], CLUSTER)
    matmuls = [node for node in placed.nodes if node.op == "matmul"]
    assert len(matmuls) >= 2
    assert {node.device for node in matmuls} == {CPUS[1]}


def test_an_index_counts_a_replicas_own_devices() -> None:
    everyones = _names("CPU:0", "GPU:0", "GPU:1", "GPU:2", "GPU:3")
    places = DeviceMap.of(everyones[3:], everyones)
    assert places.home == everyones[1]
    assert places.names == {
        everyones[1]: everyones[3],
        everyones[2]: everyones[4],
        everyones[0]: everyones[0],  # the host, which no replica owns
    }


def test_the_log_says_operation_device_and_reason(log: pytest.LogCaptureFixture) -> None:
    strategy = ar.MirroredStrategy(["CPU:2", "CPU:3"], devices_per_replica=2)
    ar.config.set_log_device_placement(True)
    try:
        with ar.device("CPU:1"):
            (result,) = strategy.run(lambda x: ar.ops.exp(x), args=(np.zeros(1),)).values
    finally:
        ar.config.set_log_device_placement(False)
        strategy.close()
    assert result == 1
    said = r"placed exp: /job:worker/replica:0/task:0/device:CPU:3 (ar.device('/device:CPU:1'))"
    assert said in log.text


ALONE = """
import numpy as np
import allreduce as ar
ar.function(lambda x: ar.ops.exp(x))(np.ones(1))
ar.config.set_log_device_placement(True)
with ar.device("CPU:0"):
    ar.ops.log(ar.ops.square(3.0))
ar.function(lambda x: ar.ops.tanh(x))(np.ones(1))
"""


def test_a_misspelt_job_is_answered_with_the_nearest() -> None:
    def at_a_job(x: ar.Tensor) -> ar.Tensor:
        with ar.device("/job:worke/task:1"):
            return ar.ops.tanh(x)

    said = r"no job 'worke'; there .*did you mean 'worker'\?$"
    with pytest.raises(DeviceError, match=said) as caught:
        _where(at_a_job)
    assert "soft" not in str(caught.value)


def test_logs_are_seen_in_a_process_that_joins_no_others() -> None:
    command = [sys.executable, "-c", ALONE]
    environment = {**os.environ, "ALLREDUCE_LOG_LEVEL": "DEBUG"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("each replica runs\n") == 2, done.stderr
    placed = [line for line in done.stderr.splitlines() if "placed" in line]
    words = [line.removeprefix("[allreduce] placed ").split(":")[0] for line in placed]
    assert words == ["constant", "square", "log", "placeholder", "tanh"]
    assert "CPU:0 (ar.device('/device:CPU:0')) <string>:7" in placed[2]


def test_devices_are_dealt_out_to_replicas_evenly() -> None:
    with pytest.raises(UsageError, match=r"3 devices .* to replicas of 2; .*set_logical_devices"):
        ar.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], devices_per_replica=2)
    with pytest.raises(UsageError, match="devices_per_replica is an integer from 1, not 0"):
        ar.MirroredStrategy(devices_per_replica=0)
    strategy = ar.MirroredStrategy(devices_per_replica=2)
    assert strategy.num_replicas_in_sync == 2
    with (
        ar.device("CPU:2"),
        pytest.raises(DeviceError, match=r"CPU:2, which .*devices_per_"),
    ):
        strategy.run(lambda x: ar.ops.exp(x), args=(np.zeros(1),))
    strategy.close()


def test_what_is_made_on_a_device_that_replicas_lack_is_refused_at_once() -> None:
    strategy = ar.MirroredStrategy(devices_per_replica=2)
    makers: dict[str, Callable[[], object]] = {
        r"layer 'head' \(Dense\)": lambda: ar.nn.Dense(2, name="head"),
        "variable 'v'": lambda: ar.Variable(1.0, name="v"),
    }
    with strategy.scope():
        for what, make in makers.items():
            with ar.device("CPU:1"):
                make()
            said = rf"test_placement.py:\d+: {what} was placed on .*CPU:2, which .*devices_per_rep"
            with ar.device("/task:0"), ar.device("CPU:2"), pytest.raises(DeviceError, match=said):
                make()
            with ar.device(lambda node: "CPU:1"):  # may be asked for a layer's parts alone
                make()


def test_soft_placement_lets_layers_be_made_anywhere(soft: None) -> None:
    strategy = ar.MirroredStrategy(["CPU:0"])
    with strategy.scope(), ar.device("GPU:7"):
        layer = ar.nn.Dense(2)
    assert strategy.run(layer, args=(np.ones((1, 3), np.float32),)).values[0].shape == (1, 2)
