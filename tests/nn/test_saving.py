"""Saved models: complete, continued to the bit, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from allreduce import nn, optim
from allreduce.errors import UsageError
from allreduce.graph import ops, set_seed
from allreduce.nn import saving
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


class Scaled(nn.Layer):
    def __init__(self, factor: float, name: str | None = None) -> None:
        super().__init__(name=name)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"factor": self.factor}


class Net(nn.Model):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Dense(width)
        self.second = nn.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"width": self.width}


def absolute(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.absolute(y_pred - y_true), axis=-1)


def test_ones_own_classes_and_functions_come_back_as_custom_objects(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    model = Net(width=5)
    model.compile(optimizer=optim.SGD(0.1, momentum=0.9), loss=absolute, metrics=[absolute])
    model.fit(x, x[:, :1], verbose=0)
    model.save(tmp_path / "net")
    custom = {"Net": Net, "absolute": absolute}
    loaded = nn.load_model(tmp_path / "net", custom_objects=custom)
    assert isinstance(loaded, Net)
    assert loaded.evaluate(x, x[:, :1], verbose=0) == model.evaluate(x, x[:, :1], verbose=0)
    with pytest.raises(UsageError, match=r"unknown layer 'Net'.*custom_objects"):
        nn.load_model(tmp_path / "net")
    with pytest.raises(UsageError, match="unknown loss 'absolute'"):
        nn.load_model(tmp_path / "net", custom_objects={"Net": Net})
    nested = nn.Sequential([nn.Input((3,)), Scaled(2.0), nn.Dense(1)])
    nested.save(tmp_path / "nested")
    loaded = nn.load_model(tmp_path / "nested", {"Scaled": Scaled})
    assert np.array_equal(loaded.predict(x, verbose=0), nested.predict(x, verbose=0))


class Forgetful(nn.Layer):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor


class Tall(nn.Sequential):
    def __init__(self, units: int) -> None:
        super().__init__([nn.Input((3,)), nn.Dense(units)])


class Tower(Tall):
    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.units = units

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}


class Doubled(nn.Layer):
    def __init__(self, k: float, **options: Any) -> None:
        super().__init__(**options)
        self.k = k

    def build(self, input_shape: Any) -> None:
        self.add_variable("factors", (input_shape[-1],), "ones")

    def call(self, x: Any) -> Any:
        return x * self.factors * self.k  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        return {"k": self.k}


class Halved(Doubled):
    def __init__(self) -> None:
        super().__init__(0.5)

    def get_config(self) -> dict[str, Any]:
        return {}


def test_options_that_a_config_leaves_out_come_back(tmp_path: Path) -> None:
    frozen = Doubled(2.0, name="frozen", dtype="float64", trainable=False)
    bare = Halved()
    bare.trainable, bare.name = False, "bare"
    nn.Sequential([nn.Input((3,)), frozen, bare, nn.Dense(1)]).save(tmp_path / "model")
    custom = {"Doubled": Doubled, "Halved": Halved}
    loaded = nn.load_model(tmp_path / "model", custom)
    first, second = loaded.layers[:2]
    assert (first.name, first.dtype, first.trainable) == ("frozen", "float64", False)
    assert first.variables[0].dtype == np.float64
    assert (second.name, second.dtype, second.trainable) == ("bare", "float32", False)
    assert len(loaded.trainable_variables) == 2
    tensors, described = saving.read(tmp_path / "model")
    for layer in described["model"]["config"]["layers"]:
        layer.pop("options", None)  # as files were before
    del described["frozen"]
    saving.write(tmp_path / "old", tensors, described)
    assert nn.load_model(tmp_path / "old", custom).layers[0].trainable


class Double(nn.Layer):
    """Uses its options in its constructor, which its config leaves out."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.inner = nn.Dense(units, dtype=self.dtype)

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def get_config(self) -> dict[str, Any]:
        return {"units": self.units}


class Closed(Double):
    """Does not take all options that its `**` seems to take."""

    def __init__(self, units: int, **others: Any) -> None:
        super().__init__(units, name="closed", **others)


class Ready(nn.Sequential):
    def __init__(self) -> None:
        super().__init__([nn.Input((3,)), nn.Dense(2)])


def test_options_are_given_to_constructors_that_use_them(tmp_path: Path) -> None:
    layers = [nn.Input((3,)), Double(4, dtype="float64"), Closed(2, dtype="float64")]
    model = nn.Sequential(layers, dtype="float64")
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model", {"Double": Double, "Closed": Closed})
    assert {variable.dtype.name for variable in loaded.variables[:2]} == {"float64"}
    x = np.ones((1, 3))
    assert np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    ready = Ready()
    ready.save(tmp_path / "ready")
    again = nn.load_model(tmp_path / "ready", {"Ready": Ready})
    assert again.name == again.path  # not the name of the first, which still lives
    assert np.array_equal(again.get_weights()[0], ready.get_weights()[0])


class Linear(nn.Model):
    """Makes its own variables, as layers do."""

    failing = False

    def build(self, input_shape: Any) -> None:  # type: ignore[override]
        super().build(input_shape)
        self.add_variable("kernel", (input_shape[-1], 1), "ones")

    def call(self, x: Any) -> Any:
        if self.failing:
            raise ValueError("not yet")
        return x @ self.kernel  # type: ignore[attr-defined]


class Affine(Linear):
    def build(self, input_shape: Any) -> None:  # type: ignore[override]
        super().build(input_shape)
        self.add_variable("bias", (1,), "zeros")

    def call(self, x: Any) -> Any:
        return super().call(x) + self.bias  # type: ignore[attr-defined]


class Kernel:
    """A mixin."""

    def build(self: Any, input_shape: Any) -> None:
        self.kernel = self.add_variable("kernel", (input_shape[-1], 1), "ones")


class Mixed(Kernel, nn.Model):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x @ self.kernel


class MixedAgain(Mixed):
    """Has the build of its base."""


def test_a_model_has_its_build_from_a_mixin() -> None:
    for kind in (Mixed, MixedAgain):
        model = kind()
        model.build((None, 3))
        np.testing.assert_array_equal(model(np.ones((1, 3))).numpy(), [[3]])
        assert list(model.named_variables()) == ["kernel"]


def test_a_model_makes_variables_in_build(tmp_path: Path) -> None:
    asked, called = Affine(name="asked"), Affine(name="called")
    asked.build((None, 3))
    called.failing = True
    with pytest.raises(ValueError, match="not yet"):
        called(np.ones((1, 3)))
    assert not called.built
    called.failing = False
    np.testing.assert_array_equal(called(np.ones((1, 3))).numpy(), [[3]])
    assert list(called.named_variables()) == ["kernel", "bias"]
    asked.compile("sgd", "mse")
    asked.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    asked.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model", {"Affine": Affine})
    for one, other in zip(asked.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    asked.build((None, 3))
    assert len(asked.variables) == 2
    assert asked.variables[0].name == "asked/kernel"


class Listed(nn.Layer):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = factors

    def call(self, x: Any) -> Any:
        return x * sum(self.factors)


class Strange(Scaled):
    def get_config(self) -> dict[str, Any]:
        return {"factor": np.float32(self.factor)}


class Other(Scaled):
    def get_config(self) -> dict[str, Any]:
        return {"scale": self.factor}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Sequential([nn.Input((3,)), Forgetful()]), "Forgetful .*takes 'factor', which"),
        (lambda: Tall(4), "Tall .* takes 'units', which get_config leaves out; give it a get_conf"),
        (lambda: nn.Sequential([nn.Input((3,)), Strange(2.0)]), "Strange .* no plain data"),
        (lambda: nn.Sequential([nn.Input((3,)), Other(2.0)]), "Other .*missing a required argum"),
        (lambda: nn.Sequential([nn.Input((3,)), Listed(2.0)]), r"Listed .*takes '\*factors', whic"),
    ],
)
def test_what_could_not_be_made_again_is_not_saved(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        make().save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    make().save_weights(tmp_path / "weights")


def test_a_sequential_that_makes_its_own_layers_comes_back(tmp_path: Path) -> None:
    Tower(4).save(tmp_path / "tower")
    loaded = nn.load_model(tmp_path / "tower", {"Tower": Tower})
    assert loaded.count_params() == 16


class Grown(Tall):
    """Takes layers after those of its base, while it is constructed."""

    def __init__(self) -> None:
        super().__init__(3)
        self.add(nn.Dense(2))


class Handed(nn.Sequential):
    """Makes its layer, and hands what all models take on."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__([nn.Dense(units)], **options)
        self.units = units

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class Stack(nn.Sequential):
    """Makes no layer, and hands all on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


class Preset(nn.Sequential):
    """Makes layers unless it is given others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"layers": [nn.Dense(4), nn.Dense(2)], **options})


class Picky(nn.Sequential):
    """Cannot do without what it is given as `**`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options.pop("layers"), **options)


def test_a_layer_that_comes_twice_comes_back_as_one(tmp_path: Path) -> None:
    twice, x = nn.Dense(3, "tanh"), np.ones((2, 3), np.float32)
    model = nn.Sequential([nn.Input((3,)), nn.Dense(3), twice, nn.Flatten(), twice, twice])
    model.save(tmp_path / "model")
    loaded = nn.load_model(tmp_path / "model")
    assert loaded.layers[1] is loaded.layers[3] is loaded.layers[4]
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    tensors, described = saving.read(tmp_path / "model")
    described["model"]["config"]["layers"][4]["as"] = 4
    saving.write(tmp_path / "damaged", tensors, described)
    with pytest.raises(UsageError, match="damaged: a layer is said to be that of place 4"):
        nn.load_model(tmp_path / "damaged")
    nested = nn.Sequential([nn.Input((3,)), nn.Sequential([twice]), twice])
    with pytest.raises(UsageError, match="is in another Sequential, too"):
        nested.save(tmp_path / "nested")


def test_layers_that_no_constructor_makes_are_not_lost(tmp_path: Path) -> None:
    grown = Grown()
    grown.save(tmp_path / "grown")
    assert nn.load_model(tmp_path / "grown", {"Grown": Grown}).count_params() == 20
    layers = [nn.Dense(4, "relu"), nn.Sequential([nn.Dense(2)])]
    for model in (Handed(4), *(kind(layers=layers) for kind in (Stack, Preset, Picky))):
        model.build((None, 3))
        model.save(tmp_path / "model")
        loaded = nn.load_model(tmp_path / "model", {type(model).__name__: type(model)})
        assert len(loaded.layers) == len(model.layers)
        x = np.ones((2, 3), np.float32)
        np.testing.assert_array_equal(loaded(x), model(x))
    tower = Tower(4)
    tower.add(nn.Dense(2))
    with pytest.raises(UsageError, match="makes its layers, but others were added later"):
        tower.save(tmp_path / "tower")


def test_weights_fit_a_model_of_another_name_and_no_other_architecture(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(2)], name="one")
    model.save_weights(tmp_path / "weights")
    same = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(2)], name="two")
    same.load_weights(tmp_path / "weights")
    for a, b in zip(model.get_weights(), same.get_weights(), strict=True):
        assert np.array_equal(a, b)
    wider = nn.Sequential([nn.Input((4,)), nn.Dense(3), nn.Dense(5)])
    with pytest.raises(UsageError, match=r"'1/kernel' has shape \(3, 2\) there, but \(3, 5\)"):
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
    with pytest.raises(OSError, match="No space left"):
        model.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


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
    with pytest.raises(UsageError, match=r"is damaged|is described by"):
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
    with pytest.raises(UsageError, match="it is a folder"):
        nn.Sequential([nn.Input((3,)), nn.Dense(2)]).save(tmp_path)


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
