"""The data of `fit`, `evaluate` and `predict`: structures of arrays, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.devices import on_host
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core import pytree
from allreduce.graph.core.spec import show


@dataclass(frozen=True, slots=True)
class Samples:
    """Arrays with one row per sample: each one array, or a tuple, list or dict of arrays.

    Attributes:
        x: The inputs.
        y: The targets; None if there are none.
        sample_weight: The samples' weights; None if all count the same.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments of a step."""
        if self.sample_weight is not None:
            return self.x, self.y, self.sample_weight
        return (self.x,) if self.y is None else (self.x, self.y)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays."""
        return [leaf for leaf in pytree.leaves(self.given) if leaf is not None]

    @property
    def rows(self) -> int:
        """The number of samples."""
        return len(self.arrays[0])

    def named(self, kind: str = "") -> dict[str, np.ndarray]:
        """Return all arrays by what errors call them: "x", "y['age']"."""
        found = {}
        for what in ("x", "y", "sample_weight"):
            value = getattr(self, what)
            if value is not None:
                for path, leaf in zip(pytree.paths(value), pytree.leaves(value), strict=True):
                    found[f"{kind}{what}{''.join(f'[{key!r}]' for key in path)}"] = leaf
        return found

    def take(self, rows: slice) -> Samples:
        """Return some of the rows."""

        def cut(leaf: np.ndarray | None) -> np.ndarray | None:
            return None if leaf is None else leaf[rows]

        return Samples(*(pytree.map_leaves(cut, each) for each in self.given))


def as_samples(
    x: Any, y: Any = None, sample_weight: Any = None, *, kind: str = "", may_be_empty: bool = False
) -> Samples:
    """Turn arguments into arrays of equal length.

    Args:
        x: An array, or a tuple, list or dict of arrays.
        y: The targets, likewise, or None.
        sample_weight: Weights, likewise, or None.
        kind: What errors put before the names: "validation ".
        may_be_empty: Whether there may be no rows.
    """
    if x is None:
        raise UsageError(f"{kind}x is missing: pass an array with one row per sample")
    given = (("x", x), ("y", y), ("sample_weight", sample_weight))
    parts = {
        name: None if value is None else _structure(value, f"{kind}{name}", may_be_empty)
        for name, value in given
    }
    samples = Samples(**parts)
    shapes = {name: array.shape for name, array in samples.named().items()}
    first = next(iter(shapes))
    other = next((name for name in shapes if shapes[name][0] != samples.rows), None)
    if other is not None:
        raise ShapeError(
            f"{kind}{first} and {other} need one row per sample each, but have {samples.rows} and "
            f"{shapes[other][0]}: their shapes are {shapes[first]} and {shapes[other]}"
        )
    return samples


def _structure(value: Any, name: str, may_be_empty: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _structure(each, f"{name}[{key!r}]", may_be_empty) for key, each in value.items()
        }
    if isinstance(value, tuple | list) and value and all(map(_is_array, value)):
        made = [
            _structure(each, f"{name}[{place}]", may_be_empty) for place, each in enumerate(value)
        ]
        return tuple(made) if isinstance(value, tuple) else made
    return _array(value, name, may_be_empty)


def _is_array(value: Any) -> bool:
    """Return whether this is an array of rows, or a structure of them, and no row."""
    if isinstance(value, Mapping):
        return True
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_array, value))
    return len(getattr(value, "shape", ())) > 0


def _array(value: Any, name: str, may_be_empty: bool) -> np.ndarray:
    try:
        array = np.asarray(on_host(value, lambda: name))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be made into one array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"{name} has dtype {array.dtype}; it takes numbers (rows of different lengths become "
            "objects: pad them; encode strings as integers)"
        )
    if not array.ndim:
        raise ShapeError(f"{name} is the scalar {array}; it needs one row per sample")
    if not len(array) and not may_be_empty:
        raise UsageError(f"{name} is empty: its shape is {array.shape}")
    return array


def gives_batches(x: Any, y: Any = None) -> bool:
    """Return whether x iterates batches, such as a generator or a DataLoader, and is no array."""
    if isinstance(x, list):  # of batches (x, y); a list of arrays is one structure
        return y is None and bool(x) and all(isinstance(each, tuple) for each in x)
    if isinstance(x, tuple | Mapping | str | bytes) or hasattr(x, "__array__"):
        return False
    if len(getattr(x, "shape", ())) or hasattr(x, "__dlpack__"):
        return False
    return isinstance(x, Iterable) or (hasattr(x, "__getitem__") and hasattr(x, "__len__"))


def length_of(batches: Any) -> int | None:
    """Return the number of batches in a pass; None if it is not known.

    A DataLoader over an iterable dataset has `__len__`, but raises in it.
    """
    try:
        return len(batches)
    except TypeError:
        return None


def one_pass(batches: Any) -> Iterator[Any]:
    """Iterate batches once; an object with a length and indices, as Keras's, in their order.

    Closing this iterator leaves a generator of the caller's open, which may go on with it.
    """
    if isinstance(batches, Iterable):
        for batch in batches:  # noqa: UP028  # `yield from` would close the generator
            yield batch
        return
    for index in range(len(batches)):
        yield batches[index]
    getattr(batches, "on_epoch_end", lambda: None)()


def as_batch(batch: Any, name: str) -> Samples:
    """Turn a batch into samples: x, or a tuple or list (x, y) or (x, y, sample_weight)."""
    given = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    if not 1 <= len(given) <= 3:
        raise UsageError(
            f"{name} is a tuple of {len(given)}; it is (x, y) or (x, y, sample_weight), where each "
            "may be a dict or tuple of arrays"
        )
    return as_samples(*given, kind=f"{name}: ")


def describe(samples: Samples) -> str:
    """Describe what batches must have in common: names, dtypes and shapes without the rows."""
    return ", ".join(
        f"{name} {array.dtype} {show(('rows', *array.shape[1:]))}"
        for name, array in samples.named().items()
    )


def validation_samples(value: Any, *, may_be_empty: bool = False) -> Samples:
    """Turn `validation_data` that is no iterable of batches into arrays."""
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        shape = getattr(value, "shape", None)
        shown = f"{value!r:.60}" if shape is None else f"one array of shape {shape}"
        if isinstance(value, tuple | list):
            shown = f"{len(value)} values"
        raise UsageError(
            "validation_data iterates batches, or is (x, y, sample_weight) or a pair (x, y), not "
            f"{shown}"
        )
    return as_samples(*value, kind="validation ", may_be_empty=may_be_empty)


def split(samples: Samples, share: float) -> tuple[Samples, Samples]:
    """Take the last rows away for validation, as Keras does."""
    at = int(samples.rows * (1 - share))
    if not 0 < at < samples.rows:
        raise UsageError(
            f"validation_split={share} of {samples.rows} rows leaves {at} to train on and "
            f"{samples.rows - at} to validate; both need some"
        )
    return samples.take(slice(None, at)), samples.take(slice(at, None))


def with_class_weight(samples: Samples, class_weight: Mapping[int, float]) -> Samples:
    """Give samples the weights of their classes; a class that is not named counts 1."""
    if samples.sample_weight is not None:
        raise UsageError("pass class_weight or sample_weight, not both: multiply them beforehand")
    if samples.y is None or len(pytree.leaves(samples.y)) != 1:
        raise UsageError("class_weight takes targets y of one output; pass sample_weight instead")
    classes = _class_numbers(samples)
    weights = np.ones(classes.shape, np.float32)
    for number, weight in class_weight.items():
        weights[classes == number] = weight
    return Samples(samples.x, samples.y, weights)


def has_classes(samples: Samples, classes: Sequence[int]) -> np.ndarray:
    """Return for each class whether a sample has it `(classes,)`; y is read by `_class_numbers`."""
    return np.isin(np.asarray(classes), _class_numbers(samples))


def _class_numbers(samples: Samples) -> np.ndarray:
    """Return the classes of targets that are one array, also inside a list or dict."""
    y: np.ndarray = pytree.leaves(samples.y)[0]
    if y.ndim < 2:
        return y
    found: np.ndarray = y.argmax(axis=-1) if y.shape[-1] > 1 else y.squeeze(-1)
    return found


def check_class_weight(class_weight: Any) -> None:
    """Refuse what is no dict of weights by class."""
    numbers = int | float | np.number
    if class_weight is not None and not (
        isinstance(class_weight, Mapping)
        and all(isinstance(key, int | np.integer) for key in class_weight)
        and all(isinstance(each, numbers) and each >= 0 for each in class_weight.values())
    ):
        raise UsageError(
            f"class_weight is a dict from a class's number to its weight, not {class_weight!r:.80}"
        )
