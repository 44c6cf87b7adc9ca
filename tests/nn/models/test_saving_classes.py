"""Layers, models and functions of one's own in files: what comes back, and what is not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.errors import UsageError
from allreduce.graph import ops
from allreduce.nn.models import saving


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


def test_a_refused_file_is_named_also_if_the_error_has_its_name_in_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net(width=5)
    model.build((1, 3))
    model.save("layer")
    with pytest.raises(UsageError, match=r"^layer cannot be loaded: unknown layer 'Net'"):
        nn.load_model("layer")


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


class Tanh(nn.Dense):
    """Fixes an argument of its base."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(units, activation="tanh", **options)


class Narrow(nn.Dense):
    """Fixes an argument of its base by its place, and an option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(2, name="narrow", **options)


def test_constructors_that_fix_arguments_of_their_base_make_layers_again(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), Tanh(4, use_bias=False, name="first"), Narrow()])
    model.save(tmp_path / "model")
    x, custom = np.ones((1, 3)), {"Tanh": Tanh, "Narrow": Narrow}
    loaded = nn.load_model(tmp_path / "model", custom)
    assert np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert [layer.name for layer in loaded.layers] == ["first", "narrow"]
    vars(model.layers[0])["activation"] = nn.activations.get("relu")
    model.save(tmp_path / "model")
    with pytest.raises(UsageError, match=r"Tanh cannot be made .* 'activation'; give it a get_"):
        nn.load_model(tmp_path / "model", custom)


class Slower(optim.Adam):
    """Fixes an argument of its base."""

    def __init__(self, **options: Any) -> None:
        super().__init__(beta_1=0.5, **options)


def test_optimizers_that_fix_an_argument_of_their_base_are_made_again(tmp_path: Path) -> None:
    model = nn.Sequential([nn.Input((3,)), nn.Dense(1)])
    decay = optim.schedules.CosineDecay(0.1, 10)
    made = Slower(learning_rate=decay, groups=undecayed, clip_norm=2)
    model.compile(made, "mse")
    model.save(tmp_path / "model")
    custom = {"Slower": Slower, "undecayed": undecayed}
    loaded = nn.load_model(tmp_path / "model", custom).optimizer
    assert optim.serialize(loaded) == optim.serialize(made)
    made.beta_1 = 0.9  # which its constructor does not take
    model.save(tmp_path / "model")
    with pytest.raises(UsageError, match=r"Slower cannot be made .* 'beta_1'; give it a get_"):
        nn.load_model(tmp_path / "model", custom)


def undecayed(path: str) -> dict[str, float]:
    return {"epsilon": 1e-6} if path.endswith("bias") else {}


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
        (lambda: Tall(4), "Tall .* takes 'units', which get_config leaves out; give it a get_"),
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


class Guarded(nn.Sequential):
    """Takes layers as `**`, and refuses what its file says."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(options.pop("layers"), **options)
        self.factor = factor
        if factor > 1:
            raise ValueError("the factor is above 1")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def test_what_a_constructor_itself_raises_is_seen(tmp_path: Path) -> None:
    model = Guarded(1.0, layers=[nn.Input((3,)), nn.Dense(2)])
    model.factor = 2.0
    model.save(tmp_path / "model")
    with pytest.raises(KeyError) as caught:  # as it is tried without layers, too
        nn.load_model(tmp_path / "model", {"Guarded": Guarded})
    assert str(caught.value.__context__) == "the factor is above 1"


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
