"""Digits trained on GPUs have the losses that they have on CPUs, up to float32's rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import allreduce as ar
from tests.gpu import launch

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
import json, sys
import numpy as np
from sklearn.datasets import load_digits
import allreduce as ar

ar.set_seed(0)
ar.config.set_buckets(1000)  # several
strategy = eval(sys.argv[1])
digits = load_digits()
x, y = (digits.data[:600] / 16).astype(np.float32), digits.target[:600].astype(np.int32)
with strategy.scope():
    model = ar.nn.Sequential([
        ar.nn.Dense(64, activation="relu"),
        ar.nn.Dropout(0.3),
        ar.nn.Dense(10, activation="softmax"),
    ])
    model.compile(optimizer=eval(sys.argv[2]), loss="sparse_categorical_crossentropy",
                  metrics=["accuracy"])
history = model.fit(x, y, batch_size=128, epochs=2, validation_data=(x[:100], y[:100]), verbose=0)
rows = model.predict(x[:7]).tolist()
if ar.init().rank == 0:
    devices = [each.local for each in strategy.devices]
    weights = [float(np.abs(each).sum()) for each in model.get_weights()]
    print(json.dumps([devices, history.history, weights, rows]))
"""

MULTI = "ar.MultiWorkerMirroredStrategy()"


def train(
    strategy: str, optimizer: str = "ar.optim.Adam(2e-3)", ranks: int = 1, **environ: str
) -> tuple[list[str], list[float]]:
    """Train in processes of their own; return the devices of rank 0, and the numbers found."""
    command = [sys.executable, "-c", TRAIN, strategy, optimizer]
    if ranks > 1:
        command = [str(ROOT / ".venv/bin/mpirun"), "-n", str(ranks), *command]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    devices, history, weights, rows = json.loads(done.stdout.splitlines()[-1])
    losses = [value for name in sorted(history) for value in history[name]]
    return devices, [*losses, *weights, *np.ravel(rows).tolist()]


@pytest.fixture(scope="module")
def on_cpus() -> list[float]:
    _, found = train('ar.MirroredStrategy(["CPU:0"])')
    return found


def test_two_ranks_train_on_a_gpu_each(on_cpus: list[float]) -> None:
    devices, found = train(MULTI, ranks=2)
    assert devices == ["GPU:0"]
    np.testing.assert_allclose(found, on_cpus, rtol=2e-4, atol=1e-6)


@pytest.mark.skipif(launch.has_driver(), reason="needs four GPUs")
def test_two_ranks_train_on_two_gpus_each(on_cpus: list[float]) -> None:
    devices, found = train(MULTI, ranks=2, STANDIN_DEVICES="4")
    assert devices == ["GPU:0", "GPU:1"]
    np.testing.assert_allclose(found, on_cpus, rtol=2e-4, atol=1e-6)


def test_one_process_trains_on_all_gpus(on_cpus: list[float]) -> None:
    devices, found = train("ar.MirroredStrategy()")
    assert devices == ["GPU:0", "GPU:1"]
    np.testing.assert_allclose(found, on_cpus, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("gpus", ["2", "4"])  # of both ranks: two logical ones, or two, for each
def test_a_model_on_two_gpus_of_each_rank_has_the_weights_of_one(gpus: str) -> None:
    example = str(ROOT / "mpi_examples" / "model_parallel.py")
    command = [str(ROOT / ".venv/bin/mpirun"), "-n", "2", sys.executable, example, "--epochs", "1"]
    environment = {**os.environ, "STANDIN_DEVICES": gpus, "STANDIN_SEED": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert "on GPU:0 and GPU:1 of each replica: test accuracy" in done.stdout, done.stderr[-3000:]
    assert "with 2 replicas: weights are the same to the bit" in done.stdout


@pytest.mark.torture
def test_the_example_trains_two_ranks_as_on_cpus(tmp_path: Path) -> None:
    weights, said = [], []
    for visible in ("0,1", ""):
        out = tmp_path / f"on {visible or 'CPUs'}"
        command = [str(ROOT / ".venv/bin/mpirun"), "-n", "2", sys.executable]
        command += [str(ROOT / "mpi_examples/train.py"), "--epochs", "2", "--out", str(out)]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        weights.append(ar.nn.load_model(out / "digits.safetensors").get_weights())
        said.append("NCCL" in done.stderr)
    assert said == [True, False]
    for here, there in zip(*weights, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-4)


OWN = """
import numpy as np
import allreduce as ar
from cuda.bindings import driver

step = ar.function(lambda x: ar.ops.all_reduce(ar.ops.sum(x)))
x = ar.PerReplica((np.ones(3, np.float32),))
(found,) = ar.MultiWorkerMirroredStrategy().run(step, (x,)).values
contexts = [driver.cuDevicePrimaryCtxGetState(ordinal)[2] for ordinal in (0, 1)]
print(f"rank {ar.init().rank}: {float(found):g}, {contexts}")
"""


def test_a_rank_makes_a_context_on_its_own_gpu_only(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN)
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert said == ["rank 0: 6, [1, 0]", "rank 1: 6, [0, 1]"], done.stderr[-2000:]


LEAVING = """
import gc, sys
import numpy as np
import allreduce as ar

comm, x = ar.init(), np.ones((1, 1 << 16), np.float32)
if sys.argv[1] == "ends, another communicator is dead":
    other = comm.split(0)
    other.abort("a test")

@ar.function
def step(x):
    x = ar.ops.sum(x, axis=0)
    for _ in range(20):  # the last of them are under way when the step returns
        x = ar.ops.all_reduce(x) * 0.5
    return x

strategy = ar.MultiWorkerMirroredStrategy()
found = strategy.run(step, (ar.PerReplica((x,)),))
if comm.rank == 0:
    print(set(found.values[0].tolist()))
elif sys.argv[1] == "drops its strategy":
    del strategy, found
    gc.collect()
if sys.argv[1] == "drops its strategy":
    comm.barrier()
"""


@pytest.mark.parametrize(
    "how", ["drops its strategy", "ends", "ends, another communicator is dead"]
)
def test_collectives_end_before_a_rank_leaves_them(how: str, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    own = {**os.environ, "STANDIN_SEED": "4", "STANDIN_DELAY": "20000"}
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script), how]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0] {1.0}\n", done.stderr[-3000:]


FAILING = """
import os, signal, sys
import numpy as np
import allreduce as ar

ar.config.set_buckets(1)  # several collectives are under way at once

def begin(timeout):
    comm = ar.init(timeout=timeout)
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [ar.Variable(np.ones(300, np.float32), name=f"w{i}") for i in range(4)]
        return comm, strategy, weights, ar.optim.SGD(0.1)

@ar.function
def step(x):
    loss = ar.ops.sum(x, axis=1)
    for each in weights:
        loss = loss + ar.ops.sum(ar.ops.square(each))
    optimizer.minimize(loss, weights)
    return loss

batch = ar.PerReplica((np.ones((3, 2), np.float32),))
comm, strategy, weights, optimizer = begin(60)
strategy.run(step, (batch,))
if sys.argv[1] == "stops":  # with all compiled that takes long on a busy machine
    strategy.close()
    comm.close()
    comm, strategy, weights, optimizer = begin(4)
pids = comm.all_gather_object(os.getpid())
try:
    for number in range(20):
        if number == 7 and comm.rank == 1:
            if sys.argv[1] == "dies":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGSTOP)
        strategy.run(step, (batch,))
except ar.AllreduceError as error:
    print(type(error).__name__, error, flush=True)
    try:
        print("has values", np.asarray(weights[0]))
    except ar.AllreduceError as error:
        print("has none:", error, flush=True)
    if sys.argv[1] == "stops":
        os.kill(pids[1], signal.SIGKILL)
    os._exit(0)
"""


@pytest.mark.parametrize(("what", "error"), [("dies", "PeerLostError"), ("stops", "TimeoutError")])
def test_a_rank_that_fails_in_training_is_named(what: str, error: str, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", str(script), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    said, values = (line.partition("] ")[2] for line in done.stdout.splitlines()[:2])
    assert said.startswith(error), done.stderr[-2000:]
    assert "rank 1" in said
    assert values.startswith("has none:"), values  # updates may have read what never came


def test_replicas_share_the_only_gpu(on_cpus: list[float]) -> None:
    strategy = '(ar.config.set_logical_devices("GPU", 3), ar.MirroredStrategy())[1]'
    devices, found = train(strategy, CUDA_VISIBLE_DEVICES="1")
    assert devices == ["GPU:0", "GPU:1", "GPU:2"]
    np.testing.assert_allclose(found, on_cpus, rtol=2e-4, atol=1e-6)


TOGETHER = """
import numpy as np
import allreduce as ar
ar.config.set_logical_devices("GPU", 10)
strategy, x = ar.MirroredStrategy(), np.arange(20, dtype=np.float32)
(batch,) = strategy.distribute_dataset([x])

@ar.function
def step(x):
    pair = ar.ops.reshape(x, (-1,))
    found = [ar.ops.all_reduce(ar.ops.sum(pair), op) for op in ("sum", "max", "min")]
    return (*found, ar.ops.all_gather(x))

for _ in range(3):
    *found, gathered = strategy.run(step, (batch,))
for each, expected in zip(found, (190, 37, 1), strict=True):
    np.testing.assert_array_equal([float(value) for value in each.values], [expected] * 10)
for value in gathered.values:
    np.testing.assert_array_equal(value, x)
print("right")
"""


def test_ten_replicas_exchange_on_one_gpu() -> None:
    own = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "STANDIN_SEED": "3"}
    command = [sys.executable, "-c", TOGETHER]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    assert done.stdout == "right\n", done.stderr[-3000:]


def test_replicas_that_share_one_of_several_gpus_are_refused() -> None:
    script = """
import numpy as np
import allreduce as ar
ar.config.set_logical_devices("GPU", 3)
try:
    ar.MirroredStrategy().run(lambda x: ar.ops.all_reduce(x), (np.ones(3, np.float32),))
except ar.AllreduceError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "UnsupportedError" in done.stdout, done.stderr
    assert "replica 0 (rank 0) and replica 2 (rank 0) use one GPU" in done.stdout
    assert "there are 3 replicas on 2 GPUs: make one logical device for each GPU, or" in done.stdout


def test_hidden_gpus_are_not_used(on_cpus: list[float]) -> None:
    devices, found = train("ar.MirroredStrategy()", CUDA_VISIBLE_DEVICES="")
    assert devices == ["CPU:0"]
    assert found == on_cpus


def test_importing_the_library_imports_no_cuda_package() -> None:
    script = "import sys, allreduce as ar; ar.nn; ar.init\nprint([n for n in sys.modules if n in ("
    script += "'cupy', 'cuda.bindings.driver', 'cuda.core', 'nccl')])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
