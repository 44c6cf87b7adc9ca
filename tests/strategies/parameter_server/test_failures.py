"""Training with parameter servers goes on when workers and servers die or stop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import allreduce as ar
from tests.server.clusters import launch
from tests.strategies.parameter_server.small_models import data, model_in

# The chief kills a worker and both servers, each once, and trains to the end.
KILLS = """
import os, signal, sys, time
from pathlib import Path
import allreduce as ar
from tests.strategies.parameter_server.small_models import data, model_in, pid_of

ar.set_seed(3)
strategy = ar.ParameterServerStrategy(
    update=sys.argv[1], checkpoint=sys.argv[2], checkpoint_every=8, timeout=60
)
model = model_in(strategy)


class Kills(ar.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        victim = {1: "worker:1", 2: "ps:1", 4: "ps:0"}.get(epoch)
        if not (strategy.is_chief and victim):
            return
        deadline = time.monotonic() + 60
        while len(list(Path(sys.argv[2]).glob("*-part-*"))) < 2 or (  # both servers write them
            epoch == 1 and victim not in strategy.status()["workers"]  # it may still start
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(pid_of(victim), signal.SIGKILL)


history = model.fit(*data(), batch_size=24, epochs=8, verbose=0, callbacks=[Kills()])
print("losses", *history.history["loss"])
"""


@pytest.mark.parametrize("update", [pytest.param("async", marks=pytest.mark.torture), "sync"])
def test_training_survives_the_death_of_a_worker_and_of_servers(
    tmp_path: Path, update: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLS)
    options = ["--cluster", "ps=2,worker=2", "--restarts", "3"]
    result = launch(options, program, update, str(tmp_path / "saved"))
    assert "others get" in result.stderr or "worker:1 has gone" in result.stderr
    for said in ("ps/task:1 is lost", "ps/task:0 is lost", "back after a restart", "checkpoint in"):
        assert said in result.stderr
    losses = [[float(n) for n in each.split()] for each in re.findall("losses (.*)", result.stdout)]
    assert [len(each) for each in losses] == [8, 8]
    if update == "async":
        assert losses[0][-1] < losses[0][0]
        return
    ar.set_seed(3)
    unbroken = model_in(ar.MirroredStrategy())
    expected = unbroken.fit(*data(), batch_size=24, epochs=8, verbose=0).history["loss"]
    # Slots are some updates older: at worst those of the first checkpoint.
    assert losses[0] == pytest.approx(expected, rel=0.25)


# A worker stops and another one dies while they compute gradients; the chief trains to the end.
BACKUPS = """
import os, signal, sys, time
from pathlib import Path
import allreduce as ar
from tests.strategies.parameter_server.small_models import data, model_in

folder = Path(sys.argv[1])
strategy = ar.ParameterServerStrategy(
    update="sync", replicas_to_aggregate=2, total_replicas=3, timeout=60
)
model = model_in(strategy)
harms = {"worker:1": signal.SIGSTOP, "worker:2": signal.SIGKILL}


def await_all(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Harms(ar.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        mine = folder / strategy.name
        if strategy.is_chief:
            await_all(lambda: all((folder / each).exists() for each in harms))
        elif not mine.exists():
            new = mine.with_suffix(".new")
            new.write_text(str(os.getpid()))
            new.rename(mine)
            os.kill(os.getpid(), harms[strategy.name])


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


history = model.fit(*data(), batch_size=24, epochs=4, verbose=0, callbacks=[Harms()])
losses = history.history["loss"]
print("losses", len(losses), losses[-1] < losses[0], "dropped", strategy.status()["dropped"])
if strategy.is_chief:
    stopped = int((folder / "worker:1").read_text())
    await_all(lambda: is_stopped(stopped))
    os.kill(stopped, signal.SIGCONT)
"""


def test_backups_train_on_while_a_worker_is_stopped_and_another_is_dead(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BACKUPS)
    options = ["--cluster", "ps=1,worker=3", "--restarts", "1"]
    result = launch(options, program, str(tmp_path))
    found = dict(re.findall(r"\[(worker:\d)\] losses 4 True dropped (\d+)", result.stdout))
    assert sorted(found) == ["worker:0", "worker:1", "worker:2"]
    assert int(found["worker:1"]) >= 1  # its own gradient, when it went on
