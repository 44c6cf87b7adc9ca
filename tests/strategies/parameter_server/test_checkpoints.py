"""Servers write checkpoints, and others go on from there."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from allreduce.strategies import parameter_server

import allreduce as ar
from allreduce.errors import UsageError
from allreduce.parameters import checkpoint
from tests.server.clusters import describe
from tests.strategies.parameter_server.small_models import (
    Worker,
    data,
    with_averages,
    with_table,
    words,
)


def test_moving_averages_are_in_checkpoints(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x, y = data()
    first = worker(servers=2, checkpoint=tmp_path)
    model = with_averages(first)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    monkeypatch.setattr(parameter_server, "_made", itertools.count(first._number))
    again = with_averages(worker(servers=2, checkpoint=tmp_path))  # on other servers
    again.train_on_batch(x[:1], y[:1])
    averages = [each.numpy() for each in model.variables if not each.trainable]
    found = [each.numpy() for each in again.variables if not each.trainable]
    # The averages differ by the last step, whose momentum is 0.99.
    for mine, its in zip(found, averages, strict=True):
        np.testing.assert_allclose(mine, its, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("after", [1, 3])
def test_another_number_of_servers_reads_a_table(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    x, y = words()
    first = worker(servers=2, checkpoint=tmp_path)
    model = with_table(first, ar.optim.Adagrad(0.1))
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    monkeypatch.setattr(parameter_server, "_made", itertools.count(first._number))
    again = with_table(worker(servers=after, checkpoint=tmp_path), ar.optim.Adagrad(0.1))
    given = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
    # The new servers' first, as both write into the folder.
    found, expected = (each.fit(x, y, **given).history["loss"] for each in (again, model))
    # Rows and their accumulators are equal: so is the training that follows.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_server_that_ends_writes_the_latest_updates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = describe({"ps": 1, "worker": 1})
    monkeypatch.setenv("ALLREDUCE_CLUSTER", spec.as_json())
    monkeypatch.setenv("ALLREDUCE_TASK", "worker:0")
    x, y = data()
    with ar.Server(spec, "ps", 0):
        strategy = ar.ParameterServerStrategy(timeout=20, checkpoint=tmp_path)
        with strategy.scope():
            model = ar.nn.Sequential([ar.nn.Dense(2, activation="softmax")])
            model.compile("sgd", "sparse_categorical_crossentropy")
        for _ in range(3):
            model.train_on_batch(x, y)
    strategy.close()
    (written,) = tmp_path.glob("*-part-0-of-1.safetensors")
    found = checkpoint.read(written)
    assert found is not None
    assert found.described["version"] == 3


def test_a_folder_that_servers_cannot_write_is_refused_at_once(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"/job:ps/task:0 cannot write checkpoints to .*file/n"
    ) as it:
        worker(checkpoint=tmp_path / "file" / "new")
    assert it.value.__notes__ == ["raised by /job:ps/task:0"]  # without the server's frames
    worker(checkpoint=tmp_path / "missing" / "new")
    assert not list((tmp_path / "missing" / "new").iterdir())
