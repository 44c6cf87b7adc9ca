"""Parameter servers and workers that are killed or stopped at random moments, a hundred times."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import allreduce as ar
from allreduce.server.protocol.channel import DEAD_SECONDS
from tests.harness import ROOT
from tests.strategies.parameter_server.small_models import data, model_in

ROUNDS = int(os.environ.get("ROUNDS", "100"))
DEADLINE = 1800.0
PROGRAM = """
import sys, time
from pathlib import Path
import allreduce as ar
from tests.strategies.parameter_server.small_models import data, model_in

ar.set_seed(3)
folder = Path(sys.argv[2])
strategy = ar.ParameterServerStrategy(
    update=sys.argv[1], checkpoint=folder / "saved", checkpoint_every=5, timeout=120
)
model = model_in(strategy)


class Ends(ar.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.005)

    def on_epoch_end(self, epoch, logs=None):
        with (folder / "epochs").open("a") as file:
            file.write(".")
        self.model.stop_training = (folder / "stop").exists()


history = model.fit(*data(), batch_size=24, epochs=100_000, verbose=0, callbacks=[Ends()])
losses = history.history["loss"]
print("ended", strategy.name, len(losses), losses[0], losses[-1], flush=True)
"""


def tasks_of(launcher: int) -> dict[str, int]:
    """Return the processes of the launcher's tasks."""
    found = {}
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for each in environment:
            if each.startswith(b"ALLREDUCE_TASK="):
                found[each.decode().partition("=")[2]] = int(pid)
    return found


def _await_epochs(path: Path, count: int, deadline: float) -> None:
    """Wait until workers have ended so many epochs more."""
    before = path.stat().st_size if path.exists() else 0
    while not path.exists() or path.stat().st_size < before + count:
        assert time.monotonic() < deadline, "training does not go on"
        time.sleep(0.02)


def _disturb(pid: int, *, stops: bool) -> None:
    """Kill a process; or stop it for so long that others take it for dead, and let it go on."""
    if not stops:
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    time.sleep(DEAD_SECONDS + 2.5)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.torture
@pytest.mark.timeout(DEADLINE + 60)
@pytest.mark.parametrize("update", ["async", "sync"])
def test_a_hundred_random_kills_of_each_role(tmp_path: Path, update: str) -> None:
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text(PROGRAM)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    choose = random.Random(seed)
    command = [sys.executable, "-m", "allreduce.run", "--cluster", "ps=2,worker=2"]
    command += ["--restarts", str(2 * ROUNDS), str(program), update, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ALLREDUCE_LOG_LEVEL": "WARNING"}
    deadline = time.monotonic() + DEADLINE
    with said.open("w") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
        try:
            for _ in range(ROUNDS):
                assert launcher.poll() is None, said.read_text()[-5000:]
                assert time.monotonic() < deadline, said.read_text()[-5000:]
                if choose.random() < 0.3:  # in the middle of what follows the kill before
                    time.sleep(choose.uniform(0.0, 1.0))
                else:
                    _await_epochs(tmp_path / "epochs", choose.randint(1, 6), deadline)
                tasks = tasks_of(launcher.pid)
                if tasks:
                    _disturb(tasks[choose.choice(sorted(tasks))], stops=choose.random() < 0.1)
            _await_epochs(tmp_path / "epochs", 10, deadline)
            (tmp_path / "stop").touch()
            code = launcher.wait(max(deadline - time.monotonic(), 1.0))
        finally:
            launcher.kill()
            launcher.wait()
    text = said.read_text()
    assert code == 0, text[-5000:]
    ended = re.findall(r"ended worker:\d (\d+) (\S+) (\S+)", text)
    assert len(ended) == 2, text[-5000:]
    for epochs, first, last in ended:
        print(f"{epochs} epochs, loss {first} to {last}")
        assert int(epochs) > 10
        assert float(last) < 0.1 * float(first), "what was learnt is kept"
        if update == "sync":
            assert float(last) == pytest.approx(_unbroken(int(epochs)), rel=0.25)


def _unbroken(epochs: int) -> float:
    """Return the loss after so many epochs without a kill."""
    ar.set_seed(3)
    model = model_in(ar.MirroredStrategy())
    losses = model.fit(*data(), batch_size=24, epochs=epochs, verbose=0).history["loss"]
    return float(losses[-1])
