"""Arrays of other libraries and of other GPUs: without a copy where possible, and in order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Buffer
from cuda.core.utils import StridedMemoryView

import allreduce as ar
from allreduce import devices, events
from allreduce.comm import replica_communicators
from allreduce.devices.cuda import cupy_streams
from allreduce.devices.cuda.kernels import copies
from tests.gpu import launch
from tests.gpu.kernels.calls import call
from tests.harness import world_of_one

SIMULATED = pytest.mark.skipif(launch.has_driver(), reason="CuPy's current stream is replaced")


def there(x: Any, name: str = "GPU:0") -> Any:
    gpu, x = devices.lookup(name), np.asarray(x)
    made = gpu.allocate(x.nbytes).array(x.dtype, x.shape)
    devices.write(made, x)
    return made


@pytest.fixture
def cupys_stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream that stands for CuPy's current one, which needs CuPy's own runtime."""
    gpu: Any = devices.lookup("GPU:0")
    stream = gpu.stream("of CuPy")
    monkeypatch.setattr(cupy_streams, "_address", lambda: stream.address)
    return stream


@SIMULATED
def test_an_array_of_cupy_is_read_after_what_its_stream_does(cupys_stream: Any) -> None:
    gpu: Any = devices.lookup("GPU:0")
    x, y = there(np.zeros(1 << 21, np.float32)), there(np.zeros(1 << 21, np.float32))
    work = gpu.own("compute")
    for value in range(1, 60):  # the last one is what CuPy computes
        call(driver.cuMemsetD8Async(x.data.ptr, value, x.nbytes, cupys_stream.handle))
    assert gpu.view(x, work) is x
    gpu.copy(y, x, work)
    work.synchronize()
    assert set(devices.read(y).view(np.uint8)) == {59}


@SIMULATED
def test_a_prepared_call_reads_what_cupys_stream_has_written_since(cupys_stream: Any) -> None:
    (comm,) = replica_communicators(world_of_one(), 1, name="prepared")
    x, y = there(np.zeros(1 << 21, np.float32)), there(np.zeros(1 << 21, np.float32))
    begin = comm.all_reduce_init(x, op="max", out=y)
    for last in (59, 58):
        for value in range(last + 1):
            call(driver.cuMemsetD8Async(x.data.ptr, value, x.nbytes, cupys_stream.handle))
        assert begin().wait() is y
        assert set(devices.read(y).view(np.uint8)) == {last}
    comm.close()


@SIMULATED
def test_cupy_writes_to_an_argument_after_the_step_has_read_it(cupys_stream: Any) -> None:
    x = there(np.zeros((1 << 11, 1 << 9), np.float32))
    strategy = ar.MirroredStrategy(["GPU:0"])
    step = ar.function(lambda x: ar.ops.max(ar.ops.exp(x * 0.0) * x, axis=1))
    for value in (59, 58):
        call(driver.cuMemsetD8Async(x.data.ptr, value, x.nbytes, cupys_stream.handle))
        found = strategy.run(step, (x,))
        call(driver.cuMemsetD8Async(x.data.ptr, 0, x.nbytes, cupys_stream.handle))
        assert set(found.values[0].view(np.uint8)) == {value}


class Interface:
    """Another library's array, which that library's stream still writes."""

    def __init__(self, x: Any, stream: Any, **more: Any) -> None:
        self.x = x
        self.described = {"shape": x.shape, "typestr": x.dtype.str, "strides": None, "version": 3}
        self.described |= {"data": (x.data.ptr, False), "stream": stream.address} | more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.described


def test_an_array_with_an_interface_is_read_after_its_stream() -> None:
    gpu: Any = devices.lookup("GPU:0")
    x, y = there(np.zeros(1 << 21, np.float32)), there(np.zeros(1 << 21, np.float32))
    theirs, work = gpu.stream("of another library"), gpu.own("compute")
    for value in range(1, 60):
        call(driver.cuMemsetD8Async(x.data.ptr, value, x.nbytes, theirs.handle))
    view = gpu.view(Interface(x, theirs), work)
    assert view.data.ptr == x.data.ptr
    gpu.copy(y, view, work)
    work.synchronize()
    assert set(devices.read(y).view(np.uint8)) == {59}


def test_an_array_with_an_interface_alone_is_no_constant_of_a_step() -> None:
    x, gpu = there(np.ones(3, np.float32)), devices.lookup("GPU:0")
    given, traces = Interface(x, gpu.own("compute")), []
    strategy = ar.MirroredStrategy(["GPU:0"])

    @ar.function
    def step(x: Any) -> Any:
        traces.append(x)
        return ar.ops.add(x, x)

    for value in (1, 2):
        devices.write(x, value)
        np.testing.assert_array_equal(strategy.run(step, (given,)).values[0], [2 * value] * 3)
    assert len(traces) == 1


def test_an_array_of_another_gpu_is_an_argument_after_its_stream() -> None:
    x = there(np.zeros((1 << 12, 1 << 9), np.float32))
    theirs: Any = devices.lookup("GPU:0").stream("of another library")
    step = ar.function(lambda x: ar.ops.max(x, axis=1))
    strategy = ar.MirroredStrategy(["GPU:1"])
    for last in (159, 158):
        for value in range(last + 1):
            call(driver.cuMemsetD8Async(x.data.ptr, value, x.nbytes, theirs.handle))
        (found,) = strategy.run(step, (Interface(x, theirs),)).values
        assert set(np.asarray(found).view(np.uint8)) == {last}


@pytest.fixture
def alone() -> Iterator[Any]:
    (comm,) = replica_communicators(world_of_one(), 1, name="alone")
    with comm:
        yield comm


ON_HOST = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"stream": 0}, "has stream 0, which could be either default stream; expected 1 for"),
        ({"version": 2}, "has version 2, but 3 is the first with a stream"),
        ({"data": None}, "lacks data"),
        ({"shape": None, "typestr": None}, "lacks shape, typestr"),
        ({"data": (ON_HOST.ctypes.data, False)}, "does not lie in a GPU's memory"),
        ({"data": (0, False)}, "its data at 0x0 does not lie in a GPU's memory"),
        ({"mask": ON_HOST}, "mask is not supported"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_a_wrong_interface_is_named(alone: Any, wrong: dict[str, Any], text: str) -> None:
    x = there(np.ones(4, np.float32))
    given = Interface(x, devices.lookup("GPU:0").own("compute"))
    given.described |= wrong
    given.described = {key: each for key, each in given.described.items() if each is not None}
    with pytest.raises(ar.UsageError) as raised:
        alone.all_reduce(given)
    said = str(raised.value)
    assert said.startswith("[nccl] rank 0: all_reduce: a GPU cannot use this Interface: "), said
    assert text in said
    assert said.endswith("; pass a CuPy array, or a copy on the host")
    with pytest.raises(ar.UsageError, match="a GPU cannot use this Interface"):
        ar.ops.exp(given)
    assert alone.all_reduce(x, out=x) is x


class Export:
    """An array of another library on a GPU, whose DLPack export is `given`."""

    def __init__(self, x: Any, given: Any) -> None:
        self.x, self.given = x, given
        self.dtype, self.shape = x.dtype, x.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given.__dlpack__(**options)


def test_what_a_library_refuses_to_give_is_told(alone: Any) -> None:
    x = there(np.ones(4, np.float32))
    given = Export(x, BufferError("it requires a gradient: use detach()"))
    with pytest.raises(ar.UsageError, match=r"rank 0: all_reduce: the array: a GPU .* detach\(\)"):
        alone.all_reduce(given)


@pytest.mark.parametrize("protocol", ["interface", "dlpack"])
def test_a_read_only_array_is_read_but_not_written(alone: Any, protocol: str) -> None:
    gpu: Any = devices.lookup("GPU:0")
    x, y = there(np.ones(4, np.float32)), there(np.zeros(4, np.float32))

    def locked(array: Any) -> Any:
        if protocol == "interface":
            return Interface(array, gpu.own("compute"), data=(array.data.ptr, True))
        buffer = Buffer.from_handle(array.data.ptr, array.nbytes, owner=array)
        found = StridedMemoryView.from_buffer(
            buffer, array.shape, dtype=array.dtype, is_readonly=True
        )
        return Export(array, found)

    alone.all_reduce(locked(x), out=y)
    assert set(devices.read(y)) == {1}
    attempts: list[Callable[[], Any]] = [
        lambda: alone.all_reduce(x, out=locked(y)),
        lambda: alone.all_reduce([x], out=[locked(y)]),
        lambda: alone.broadcast(x, root=0, out=locked(y)),
        lambda: alone.recv(locked(y), source=0),
    ]
    for attempt in attempts:
        with pytest.raises(ar.UsageError, match=r"out: this \w+ is read-only; pass a"):
            attempt()


@pytest.mark.parametrize("protocol", ["cupy", "interface"])
def test_data_on_a_gpu_trains_as_on_the_host(protocol: str) -> None:
    gpu, strategy = devices.lookup("GPU:0"), ar.MirroredStrategy(["GPU:0"])

    def given(x: Any) -> Any:
        there_too = there(x)
        return there_too if protocol == "cupy" else Interface(there_too, gpu.own("compute"))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 3)).astype(np.float32), rng.normal(size=(32, 1)).astype(np.float32)
    losses = []
    for inputs, targets in ((x, y), (given(x), given(y))):
        ar.set_seed(0)
        with strategy.scope():
            model = ar.nn.Sequential([ar.nn.Dense(1)])
            model.compile(optimizer="sgd", loss="mean_squared_error")
        losses.append(model.fit(inputs, targets, batch_size=8, verbose=0).history["loss"])
        assert model.evaluate(inputs, targets, verbose=0) == model.evaluate(x, y, verbose=0)
        np.testing.assert_array_equal(model.predict(inputs), model.predict(x))
    assert losses[0] == losses[1]
    for first, second in strategy.distribute_dataset([(given(x), given(y))]):
        np.testing.assert_array_equal(devices.read(first.values[0]), x)
        np.testing.assert_array_equal(devices.read(second.values[0]), y)


def test_an_array_with_dlpack_is_not_copied() -> None:
    gpu: Any = devices.lookup("GPU:0")
    x = there(np.arange(64, dtype=np.int8))
    theirs = Buffer.from_handle(x.data.ptr, x.nbytes, owner=x)
    assert gpu.borrows(theirs)
    view = gpu.view(theirs, gpu.own("compute"))
    assert view.data.ptr == x.data.ptr
    np.testing.assert_array_equal(devices.read(view), np.arange(64, dtype=np.int8))


@SIMULATED
def test_what_a_users_kernel_enqueues_by_cupy_goes_to_the_steps_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy's own runtime needs a driver; a list stands for its stack of streams."""
    cupys: list[int] = []

    @contextmanager
    def stream(address: int) -> Iterator[None]:
        cupys.append(address)
        yield
        cupys.pop()

    def fill(out: Any, inputs: Any, attrs: Any) -> None:
        call(driver.cuMemsetD8Async(out.data.ptr, 7, out.nbytes, cupys[-1]))

    monkeypatch.setattr(cupy_streams, "_stream", stream)
    filled = ar.register_op(
        "filled", shape=lambda specs, attrs: specs[0], cpu=lambda *_: None, cuda=fill
    )
    x = np.ones((64, 1 << 12), np.float32)
    step = ar.function(lambda x: ar.ops.sum(filled(ar.ops.exp(x)), axis=1))
    (found,) = ar.MirroredStrategy(["GPU:0"]).run(step, (x,)).values
    sevens = np.full((64, 4 << 12), 7, np.uint8).view(np.float32)
    np.testing.assert_allclose(found, sevens.sum(axis=1), rtol=1e-6)


def test_an_array_of_another_gpu_is_read_after_what_its_streams_do() -> None:
    theirs, work = devices.lookup("GPU:1"), devices.lookup("GPU:1").own("compute")
    x, y = there(np.zeros(1 << 21, np.float32), "GPU:1"), there(np.zeros(1 << 21, np.float32))
    for value in range(1, 60):
        work.launch(theirs.assign, x, value)
    devices.write(y, x)
    assert set(devices.read(y)) == {59}


@SIMULATED
def test_a_results_memory_is_used_again_behind_cupys_last_use(cupys_stream: Any) -> None:
    gpu: Any = devices.lookup("GPU:0")
    y = there(np.zeros(1 << 22, np.uint8))
    for _ in range(3):
        result = gpu.allocate_result(1 << 22).array(np.uint8, (1 << 22,))
        devices.write(result, 7)
        for _ in range(20):  # CuPy still reads it when the program drops it
            call(
                driver.cuMemcpyDtoDAsync(y.data.ptr, result.data.ptr, y.nbytes, cupys_stream.handle)
            )
        del result
        other = gpu.allocate_result(1 << 22).array(np.uint8, (1 << 22,))
        devices.write(other, 9)
        cupys_stream.synchronize()
        assert set(devices.read(y)) == {7}


@pytest.mark.parametrize("mover", ["GPU:0", "GPU:1"])
@pytest.mark.parametrize("way", ["whole", "transposed", "reversed", "cast", "broadcast"])
def test_copies_between_gpus(way: str, mover: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    source = there(x)
    ways: dict[str, tuple[np.ndarray, Any]] = {
        "whole": (x, source),
        "transposed": (x.T, source.T),
        "reversed": (x[::-1, 1:3], source[::-1, 1:3]),
        "cast": (x.astype(np.int64), source),
        "broadcast": (np.broadcast_to(x[1], (3, 4)), source[1]),
    }
    wanted, source = ways[way]
    target = there(np.zeros(wanted.shape, wanted.dtype), "GPU:1")
    stream: Any = devices.lookup(mover).own("device-to-device")
    stream.launch(devices.lookup(mover).assign, target, source)
    stream.synchronize()
    np.testing.assert_array_equal(devices.read(target), wanted)


def test_a_path_between_gpus_that_cannot_be_opened_leaves_the_threads_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there(np.zeros(3), "GPU:1")
    there(np.zeros(3), "GPU:0")  # the thread's latest
    before = call(driver.cuCtxGetCurrent())
    refused = (driver.CUresult.CUDA_ERROR_TOO_MANY_PEERS,)
    monkeypatch.setattr(driver, "cuCtxEnablePeerAccess", lambda peer, flags: refused)
    copies._open_path.cache_clear()
    with pytest.raises(ar.AllreduceError, match="CUDA_ERROR_TOO_MANY_PEERS"):
        copies._open_path(1, 0)
    assert int(call(driver.cuCtxGetCurrent())) == int(before)


def copy_repeatedly() -> None:
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("allreduce").setLevel(logging.INFO)
    for source, target in [("GPU:0", "GPU:1"), ("GPU:1", "GPU:0")] * 2:
        devices.write(there(np.zeros(3), target), there(np.ones(3), source))
    print("copied")


@SIMULATED
@pytest.mark.parametrize("reach", ["0", "1"])
def test_gpus_that_cannot_reach_each_other_are_logged_once(reach: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import copy_repeatedly as f; f()"],
        env={
            **os.environ,
            "STANDIN_PEERS": reach,
            "STANDIN_LOG": "1",
            "PYTHONPATH": str(launch.ROOT),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "copied\n", done.stderr
    assert done.stderr.count("copies between them go through the host") == (reach == "0")
    through_host = done.stderr.count("a copy between devices goes through the host")
    assert through_host == (4 if reach == "0" else 0)


def test_arrays_of_gpus_are_arguments_of_steps_and_operators(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.linspace(0, 1, 5, dtype=np.float32)
    for strategy in ("GPU:0", "GPU:1", "CPU:0"):
        step = ar.MirroredStrategy([strategy]).run(lambda t: ar.ops.exp(t), (there(x),))
        np.testing.assert_allclose(step.values[0], np.exp(x), rtol=1e-6)
    variable = ar.Variable(there(x), name="of an array on a GPU")
    np.testing.assert_array_equal(variable.numpy(), x)
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, events.logger.name)
    monkeypatch.setattr(devices._here, "_copied", False)
    caplog.clear()  # after other tests, the copies above are logged too
    for _ in range(2):
        np.testing.assert_allclose(ar.ops.add(there(x), x).numpy(), 2 * x, rtol=1e-6)
        np.testing.assert_allclose(
            ar.ops.add(there(x), there(x, "GPU:1")).numpy(), 2 * x, rtol=1e-6
        )
    (logged,) = [each.message for each in caplog.records if "copied to the host" in each.message]
    assert "test_arrays.py" in logged
    assert "GPU:0" in logged
