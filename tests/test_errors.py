"""The error tree: what a caller can catch, and what an unknown name is told."""

from __future__ import annotations

import builtins
import re

import pytest

from allreduce import errors

BUILTIN_TWINS = {
    errors.UsageError: ValueError,
    errors.ShapeError: ValueError,
    errors.DeviceError: ValueError,
    errors.ClosedError: ValueError,
    errors.TimeoutError: builtins.TimeoutError,
    errors.PeerLostError: ConnectionError,
    errors.MismatchError: ValueError,
    errors.UnsupportedError: NotImplementedError,
    errors.OutOfMemoryError: MemoryError,
    errors.NumericsError: ArithmeticError,
}


def classes() -> dict[str, type[Exception]]:
    return {
        name: each
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, Exception)
    }


@pytest.mark.parametrize(("error", "twin"), BUILTIN_TWINS.items())
def test_errors_can_be_caught_as_pythons_own(error: type[Exception], twin: type[Exception]) -> None:
    with pytest.raises(twin, match="why"):
        raise error("why")


def test_one_root_catches_everything() -> None:
    assert set(BUILTIN_TWINS) <= set(classes().values())
    for each in classes().values():
        assert issubclass(each, errors.AllreduceError)


def test_the_drawing_shows_the_tree_that_is_there() -> None:
    drawn = re.findall(r"([│ ]*)[├└]── (\w+)(?:.*also (?:builtins\.)?(\w+))?", errors.__doc__ or "")
    assert {name for _, name, _ in drawn} == classes().keys() - {"AllreduceError"}
    for indent, name, twin in drawn:
        parent = errors.UsageError if "│   " in indent[4:] else errors.AllreduceError
        assert parent in classes()[name].__bases__, name
        assert not twin or issubclass(classes()[name], getattr(builtins, twin)), name


def test_an_unknown_name_is_told_what_exists_and_what_is_near() -> None:
    error = errors.unknown_name("optimizer", "addam", ["sgd", "adam"])
    assert str(error) == "unknown optimizer 'addam': there are adam, sgd; did you mean 'adam'?"
    assert str(errors.unknown_name("loss", 3, ["mse"])) == "unknown loss 3: there are mse"


@pytest.mark.parametrize(
    ("given", "meant"), [("average", "mean"), ("ADD", "sum"), ("maximum", "max")]
)
def test_what_others_call_it_is_understood(given: str, meant: str) -> None:
    known = ["max", "mean", "min", "sum"]
    assert errors.did_you_mean(given, known) == f"; did you mean {meant!r}?"
    assert errors.did_you_mean(given, ["relu"]) == ""


@pytest.mark.parametrize(
    ("given", "near"),
    [
        *(("nadam", "adam"), ("rmse", "mse"), ("elu", "relu"), ("Conv1D", "Conv2D")),
        *(("mean_iou", "mean"), ("MeanAbsolutePercentageError", "MeanAbsoluteError")),
        *(("cross_entropy", "binary_crossentropy"), ("Average", "AveragePooling2D")),
    ],
)
def test_no_name_of_another_thing_is_suggested(given: str, near: str) -> None:
    assert errors.did_you_mean(given, [near]) == ""


@pytest.mark.parametrize(
    ("given", "meant"), [("MSE", "mse"), ("ReLU", "ReLU6"), ("acc", "accuracy"), ("Adam", "adam")]
)
def test_case_and_short_forms_are_understood(given: str, meant: str) -> None:
    known = ["accuracy", "adam", "mse", "ReLU6"]
    assert str(errors.unknown_name("name", given, known)).endswith(f"did you mean {meant!r}?")


def test_another_message_keeps_class_attributes_and_notes() -> None:
    error = errors.everywhere(errors.PeerLostError("rank 1 died"))
    error.interrupted = True
    error.add_note("while saving")
    made = errors.reworded(error, f"part 'in' failed: {error}")
    assert (type(made), str(made)) == (errors.PeerLostError, "part 'in' failed: rank 1 died")
    assert (made.everywhere, made.interrupted, made.__notes__) == (True, True, ["while saving"])
