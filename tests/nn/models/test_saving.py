"""Saved models: complete, continued to the bit, written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from allreduce import nn, optim
from allreduce.errors import UsageError
from allreduce.events import logger
from allreduce.graph import set_seed
from allreduce.nn.models import saving
from tests.nn.common import blobs, classifier


def test_a_loaded_model_goes_on_to_the_bit(tmp_path: Path) -> None:
    x, y = blobs()
    model = classifier(dropout=0.3)
    model.fit(x, y, batch_size=25, epochs=2, verbose=0)
    model.save(tmp_path / "model")
    wanted = model.fit(x, y, batch_size=25, epochs=2, verbose=0)
    loaded = nn.load_model(tmp_path / "model")
    assert isinstance(loaded.optimizer, optim.Adam)
    assert loaded.optimizer.iterations == 8
    assert loaded.optimizer.learning_rate == 0.01
    got = loaded.fit(x, y, batch_size=25, epochs=2, verbose=0)
    assert got.history == wanted.history
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert np.array_equal(a, b)


def test_the_name_of_another_format_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: warnings.append(text % args))
    saving._warn_of_format.cache_clear()
    x, y = blobs()
    model = classifier()
    model.fit(x, y, verbose=0)
    for name in ("a.keras", "b.keras", "c.safetensors", "c"):
        model.save(tmp_path / name)
        nn.load_model(tmp_path / name)
    assert len(warnings) == 1
    assert "saved as safetensors, also under a name that ends with .keras" in warnings[0]


def test_dropout_goes_on_with_accumulated_gradients(tmp_path: Path) -> None:
    x, y = blobs()
    model = classifier(dropout=0.3)
    model.compile("adam", "sparse_categorical_crossentropy", gradient_accumulation=2)
    model.fit(x, y, batch_size=25, epochs=2, verbose=0)
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model")
    wanted = model.fit(x, y, batch_size=25, epochs=2, verbose=0)
    assert loaded.fit(x, y, batch_size=25, epochs=2, verbose=0).history == wanted.history


def test_optimizer_state_survives_being_saved_again_before_a_step(tmp_path: Path) -> None:
    x, y = blobs()
    model = classifier()
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "first")
    nn.load_model(tmp_path / "first").save(tmp_path / "second")
    first, second = (saving.read(tmp_path / name)[0] for name in ("first", "second"))
    assert {f"optimizer/{path}/m" for path in ("0/kernel", "1/bias")} < first.keys()
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_weights_fit_a_model_of_another_name_and_no_other_architecture(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(2)], name="one")
    model.save_weights(tmp_path / "weights")
    same = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(2)], name="two")
    same.load_weights(tmp_path / "weights")
    for a, b in zip(model.get_weights(), same.get_weights(), strict=True):
        assert np.array_equal(a, b)
    wider = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(5)])
    with pytest.raises(UsageError, match=r"1/kernel' has shape \(3, 5\), .* for it \(3, 2\)"):
        wider.load_weights(tmp_path / "weights")
    deeper = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(2), nn.Dense(1)])
    with pytest.raises(UsageError, match="it has no variable '2/kernel'"):
        deeper.load_weights(tmp_path / "weights")
    shallower = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    with pytest.raises(UsageError, match="has no variable '1/bias'"):
        shallower.load_weights(tmp_path / "weights")
    with pytest.raises(UsageError, match="has weights only"):
        nn.load_model(tmp_path / "weights")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    path = tmp_path / "model"
    model.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=f"{path}.*truncated"):
        nn.load_model(path)


def test_foreign_and_missing_files_are_named(tmp_path: Path) -> None:
    save_file({"x": np.ones(3)}, tmp_path / "foreign")
    with pytest.raises(UsageError, match=r"foreign.* not a model saved by this library"):
        nn.load_model(tmp_path / "foreign")
    with pytest.raises(UsageError, match=r"no saved model at .*missing"):
        nn.load_model(tmp_path / "missing")
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    with pytest.raises(UsageError, match="there is no folder"):
        model.save(tmp_path / "no" / "model")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seed(0)
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    path = tmp_path / "model"
    model.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    model.set_weights([weight + 1 for weight in model.get_weights()])
    said = f"cannot save to {path}: No space left on device; make room there, or name a file"
    for save in (model.save, model.save_weights):
        with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
            save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/model", "No such file or directory; name a file elsewhere"),
        ("x" * 256, "File name too long; use a shorter name"),
        ("x" * 300 + "/model", "File name too long; use a shorter name"),
        ("a\0b", "the path has a null byte; name a file"),
    ],
)
def test_a_place_that_takes_no_file_is_named_with_the_systems_words(path: str, said: str) -> None:
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    for save in (model.save, model.save_weights):
        with pytest.raises(UsageError, match=f"^cannot save to .*: {said}$"):
            save(path)
    for load in (model.load_weights, nn.load_model):
        with pytest.raises(UsageError, match=r"^(there is no saved model at|cannot load) "):
            load(path)


def test_a_folder_that_takes_no_file_is_told_from_other_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    model = nn.Sequential([nn.Input((4,)), nn.Dense(3)])
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    for number, remedy in (
        (errno.EACCES, "allow to write there, or name"),
        (errno.EROFS, "allow to write there, or name"),
        (errno.EDQUOT, "make room there, or name"),
        (errno.EIO, "name"),
    ):
        said = f"^cannot save to {tmp_path}/model: {os.strerror(number)}; {remedy} a file elsewhere"
        with pytest.raises(UsageError, match=said):
            model.save(tmp_path / "model")


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "[1]",
        '{"model": {"class": "Dense"}}',
        '{"model": {"class": "Dense"}, "sample": [[3], "float32"], "epochs_done": 0, '
        '"compiled": null}',
        '{"model": {"class": "Dense", "config": {"units": 2}}, "sample": 3, "epochs_done": 0, '
        '"compiled": null}',
        '{"model": {"class": "Dense", "config": {"units": 2}}, "sample": [[3], "float32"], '
        '"epochs_done": 0, "compiled": {"loss": {}}}',
    ],
)
def test_damaged_descriptions_are_named(tmp_path: Path, text: str) -> None:
    metadata = {"format": saving.FORMAT, "allreduce": text}
    save_file({"weights/0/kernel": np.ones((3, 2))}, tmp_path / "damaged", metadata=metadata)
    with pytest.raises(UsageError, match=r"is damaged|is described by|not a model"):
        nn.load_model(tmp_path / "damaged")


@pytest.mark.parametrize("options", ['{"trainable": "no"}', '{"dtype": "int7"}', '{"x": 1}', "3"])
def test_damaged_options_are_named(tmp_path: Path, options: str) -> None:
    text = f'{{"model": {{"class": "Flatten", "config": {{}}, "options": {options}}}, '
    text += '"sample": [[3], "float32"], "epochs_done": 0, "compiled": null}'
    metadata = {"format": saving.FORMAT, "allreduce": text}
    save_file({"weights/0/kernel": np.ones((3, 2))}, tmp_path / "damaged", metadata=metadata)
    with pytest.raises(UsageError, match="damaged: it describes the options of layer 'Flatten'"):
        nn.load_model(tmp_path / "damaged")


def test_a_folder_is_no_place_to_save_to(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    with pytest.raises(UsageError, match="it is a folder"):
        model.save(tmp_path)
    for save in (model.save, model.save_weights):
        with pytest.raises(UsageError, match=r"^cannot save to '': the path is empty; name a file"):
            save("")


def test_only_files_are_replaced_and_only_paths_taken(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: it is a device, a pipe or a socket"):
        model.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    for call in (model.save, model.save_weights, model.load_weights, nn.load_model):
        for path in (3, None):
            with pytest.raises(UsageError, match=f"cannot [a-z ]+ {path}: a path is text"):
                call(path)  # type: ignore[arg-type]


def test_weights_are_loaded_all_or_none(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(2)])
    before = model.get_weights()
    path = tmp_path / "weights"
    kernel, bias = np.ones((3, 2)), np.ones(2, np.complex64)
    weights: dict[str, Any] = {"weights/0/kernel": kernel, "weights/0/bias": bias}
    save_file(weights, path, metadata={"format": saving.FORMAT, "allreduce": "{}"})
    with pytest.raises(UsageError, match=r"'sequential.*bias' holds float32.* complex64"):
        model.load_weights(path)
    assert all(np.array_equal(*pair) for pair in zip(model.get_weights(), before, strict=True))
