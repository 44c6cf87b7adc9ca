"""Steps on GPUs take no memory and load no kernels while they run, and find errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import allreduce as ar

CHECKED = """
import numpy as np
import allreduce as ar

strategy = ar.MirroredStrategy(["GPU:0"])
x = np.ones((3, 3), np.float32)
found = []
ar.config.enable_sync_errors()
found.append(strategy.run(lambda x: ar.ops.exp(x) @ x, (x,)).values[0])
ar.config.enable_sync_errors(False)
ar.config.run_functions_eagerly(True)
found.append(strategy.run(lambda x: ar.ops.exp(x) @ x, (x,)).values[0])
ar.config.run_functions_eagerly(False)
for each in found:
    np.testing.assert_allclose(each, np.exp(x) @ x, rtol=1e-6)
ar.config.enable_check_numerics()
own = ar.register_op("own", shape=lambda specs, attrs: specs[0], cpu=lambda out, x, attrs: 0)
for wrong in (lambda x: ar.ops.log(x - 1.0) + 1.0, lambda x: own(x)):
    try:
        strategy.run(wrong, (x,))
    except ar.AllreduceError as error:
        print(type(error).__name__, error)
"""


def test_modes_for_finding_errors_work_on_gpus() -> None:
    done = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True)
    numerics, missing = done.stdout.splitlines()
    assert "NumericsError" in numerics, done.stderr
    assert "9 Inf" in numerics
    assert 'no kernel of own, so place it with ar.device("CPU:0")' in missing


@pytest.mark.parametrize("devices", [["GPU:0"], ["GPU:0", "GPU:1"]], ids=len)
def test_an_operation_of_the_host_works_on_a_value_of_a_gpu(devices: list[str]) -> None:
    strategy = ar.MirroredStrategy(devices)
    with strategy.scope():
        w = ar.Variable(np.ones((3, 2), np.float32), name="w")
        optimizer = ar.optim.SGD(1.0)

    @ar.function
    def step(x: ar.Tensor) -> ar.Tensor:
        y = x @ w
        with ar.device("CPU:0"):
            there = ar.ops.exp(y)
        optimizer.minimize(ar.ops.sum(there * y, axis=1), [w])
        return there

    (batch,) = strategy.distribute_dataset([np.full((4, 3), 0.1, np.float32)])
    for part in strategy.local_results(strategy.run(step, (batch,))):
        np.testing.assert_allclose(part, np.exp(np.full_like(part, 0.3)), rtol=1e-5)
    slope = 0.1 * np.exp(0.3) * 1.3
    np.testing.assert_allclose(w.numpy(), np.full((3, 2), 1 - slope), rtol=1e-5)


MARKED = """
import os
import numpy as np
import allreduce as ar
from allreduce.graph.execute.bound_program import BoundProgram

run = BoundProgram.run

def marked(self, *arguments):
    os.write(2, b"begins a step\\n")
    try:
        return run(self, *arguments)
    finally:
        os.write(2, b"ends a step\\n")

BoundProgram.run = marked
"""

QUIET = """
import json, threading
from allreduce.devices.cuda.kernels import layout
from allreduce.devices.cuda.modules import blocks, launch
from allreduce.graph.execute import reports

wait_for, here, waits = reports.wait_for, threading.local(), []

def counted(self, *arguments):
    here.waits = []
    try:
        return marked(self, *arguments)
    finally:
        waits.append(here.waits)

def noted(frame, node, work):
    here.waits.append(node.op)
    wait_for(frame, node, work)

BoundProgram.run, reports.wait_for = counted, noted

def users_kernel(out, inputs, attrs):  # what it launches is loaded at its first call
    pointers = [each.data.ptr for each in (out, *inputs)]
    signature = f"P P q {layout.STRIDED}"
    launch("elementwise", "sin_f32", blocks(out.size), signature, *pointers, out.size,
           layout.CONTIGUOUS)

users = ar.register_op("users", shape=lambda specs, attrs: specs[0], cpu=print, cuda=users_kernel,
                       gradient=lambda dy, y, inputs, attrs: [dy])

class Users(ar.nn.Layer):
    def call(self, inputs):
        return users(inputs)

ar.config.set_buckets(1)  # each variable is reduced by itself
nn, x = ar.nn, np.random.default_rng(0).standard_normal((80, 20, 20, 3)).astype(np.float32)
with ar.MirroredStrategy().scope():
    model = nn.Sequential([
        nn.Conv2D(4, 3, activation="relu"), nn.MaxPool2D(2), nn.BatchNorm(), nn.Flatten(),
        nn.Dropout(0.1), Users(), nn.Dense(5),
    ])
    loss = nn.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=ar.optim.Lamb(1e-3, clip_norm=1.0, ema_momentum=0.9), loss=loss)
model.fit(x, np.arange(80) % 5, batch_size=32, epochs=2, verbose=0)
print(json.dumps(waits))
"""


# What waits for all work of a GPU; the last one is cuBLAS's.
WAITING = ("cuMemAlloc_v2", "cuMemHostAlloc", "cuModuleLoadData", "cuFuncLoad", "loads kernels")
PEERS = ("cuDevicePrimaryCtxRetain", "cuCtxEnablePeerAccess")


def calls_of_driver(script: str) -> tuple[str, dict[bool, Counter[str]]]:
    """Run a script behind `MARKED`; return its output, and its calls in steps and outside."""
    command, own = [sys.executable, "-c", MARKED + script], {**os.environ, "STANDIN_LOG": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    running = 0
    found = {is_running: Counter[str]() for is_running in (False, True)}
    for line in done.stderr.splitlines():
        running += line.startswith("begins a step") - line.startswith("ends a step")
        if line.startswith("stand-in "):
            found[running > 0][line.partition(": ")[2]] += 1
    return done.stdout, found


def test_steps_take_no_memory_and_load_no_kernels() -> None:
    said, found = calls_of_driver(QUIET)
    assert found[True]["cuLaunchKernel"] > 100
    for name in WAITING:
        assert found[False][name] > 0, name
        assert found[True][name] == 0, (name, found[True])
    waits = json.loads(said.splitlines()[-1])
    assert len(waits) == 12  # of two replicas, each in two epochs of three batches
    assert all(each == waits[0] for each in waits), waits  # the first step's are no others


FED = """
from allreduce import devices

rows, strategy = 2000, ar.MirroredStrategy()
x = np.random.default_rng(0).standard_normal((rows, 31)).astype(np.float32)
w = np.random.default_rng(1).standard_normal((31, 33)).astype(np.float32)

def there(gpu, x):
    made = gpu.allocate(x.nbytes).array(x.dtype, x.shape)
    devices.write(made, x)
    return made

def fed(way, name):
    gpu = devices.lookup(name)
    if way == "transposed":
        return there(gpu, np.ascontiguousarray(x.T)).T
    if way == "misaligned":
        return there(gpu, np.pad(x.ravel(), (1, 0)))[1:].reshape(x.shape)
    if way == "with gaps":
        return there(gpu, np.repeat(x, 2, axis=0))[::2]
    return x if way == "on the host" else there(gpu, x)

@ar.function
def step(x, w):
    total = ar.ops.all_reduce(ar.ops.sum(x, axis=0))  # under way as the rest is computed
    return total, x @ w, ar.ops.sum(x, axis=1)

ways = ("whole", "transposed", "misaligned", "with gaps", "on the host", "whole")
given = [tuple(fed(way, name) for name in ("GPU:0", "GPU:1")) for way in ways]
given.append(fed("with gaps", name) for name in ("GPU:1", "GPU:0"))  # the other replica's
for pair in given:
    for result, wanted in zip(
        strategy.run(step, (ar.PerReplica(tuple(pair)), w)),
        (2 * x.sum(0), x @ w, x.sum(1)), strict=True,
    ):
        for value in result.values:
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-3)
"""


def test_arguments_are_brought_into_order_before_a_step() -> None:
    _, found = calls_of_driver(FED)
    assert found[True]["cuLaunchKernel"] > 10
    for name in (*WAITING, *PEERS):
        assert found[False][name] > 0, name
        assert found[True][name] == 0, (name, found[True])


LATE = """
import sys
import numpy as np
import allreduce as ar
from allreduce.devices.cuda.driver import api, call
from allreduce.devices.cuda.modules import launch

calls = []

def wrong(out, inputs, attrs):
    calls.append(out)
    if len(calls) == 1:  # before the first step
        return
    gone = int(call(api.cuMemAlloc, 400))
    call(api.cuMemFree, gone)
    launch("copy", "fill_4", 1, "P I q", gone, 0, 3)

wrong = ar.register_op("wrong", shape=lambda s, a: s[0], cpu=lambda *_: 0, cuda=wrong)
ar.config.enable_sync_errors(sys.argv[1] == "at once")
try:
    strategy = ar.MirroredStrategy(["GPU:0"])
    found = strategy.run(ar.function(lambda x: ar.ops.exp(wrong(x)) + 1.0), (np.ones(3, "f4"),))
    np.asarray(found.values[0])
except ar.AllreduceError as error:
    print(error, *getattr(error, "__notes__", ()), flush=True)
import os
os._exit(0)  # the context is lost, and cannot be tidied up
"""


@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_late_error_is_found_at_its_own_operator(when: str) -> None:
    command = [sys.executable, "-c", LATE, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout, done.stderr[-2000:]
    assert ("operator 'wrong' at <string>:22" in done.stdout) == (when == "at once"), done.stdout


DOUBTFUL = """
import numpy as np
import allreduce as ar
from allreduce.devices.cuda.kernels import elementwise
from allreduce.devices.cuda.modules import launch

calls = []

def doubled(out, inputs, attrs):
    calls.append(inputs)
    if len(calls) <= 2:  # of both replicas, before the first step: on zeros
        raise ValueError("a zero")
    elementwise.binary("add")(out, [*inputs, *inputs], {})

doubled = ar.register_op("doubled", shape=lambda s, a: s[0], cpu=lambda *_: 0, cuda=doubled)
strategy, x = ar.MirroredStrategy(), np.arange(8, dtype=np.float32)
(batch,) = strategy.distribute_dataset([x])
step = ar.function(lambda x: ar.ops.all_reduce(ar.ops.sum(doubled(x))))
for _ in range(2):
    for each in strategy.run(step, (batch,)).values:
        np.testing.assert_array_equal(each, 56)
print("right")
"""


def test_a_kernel_that_refuses_zeros_is_first_loaded_in_a_step() -> None:
    own = {**os.environ, "STANDIN_SEED": "3"}
    command = [sys.executable, "-c", DOUBTFUL]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    assert done.stdout == "right\n", done.stderr[-3000:]


LOST = """
import ctypes
import allreduce as ar
from allreduce import devices
from allreduce.devices.cuda.driver import api, call
from allreduce.devices.cuda.modules import launch

gpu = devices.lookup("GPU:0")
stream, result = gpu.own("compute"), gpu.allocate_result(16)
stream.launch(lambda: launch("copy", "fill_4", 1, "P I q", 0, 0, 0))
gone = int(call(api.cuMemAlloc, 400))
call(api.cuMemFree, gone)
stream.launch(lambda: launch("copy", "fill_4", 1, "P I q", gone, 0, 3))
try:
    stream.synchronize()
except ar.AllreduceError:
    pass
try:
    stream.launch(lambda: launch("copy", "fill_2", 1, "P H q", gone, 0, 3))
except ar.AllreduceError as error:
    print(type(error).__name__, error, flush=True)
del result
import os
os._exit(0)
"""


def test_a_lost_gpu_is_no_missing_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("CudaError"), done.stdout + done.stderr[-2000:]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout
    assert "Exception ignored" not in done.stderr  # of memory that is released afterwards
