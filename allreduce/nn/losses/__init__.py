"""Losses: functions `(y_true, y_pred)` that give one value per sample, and classes with options.

A new loss is a function and a class in one of these files, and its row in `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.graph.core.tensor import Tensor
from allreduce.nn.core import objects
from allreduce.nn.losses.base import EPSILON, Loss
from allreduce.nn.losses.crossentropy import (
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    KLDivergence,
    SparseCategoricalCrossentropy,
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    class_numbers,
    kl_divergence,
    sparse_categorical_crossentropy,
)
from allreduce.nn.losses.regression import (
    CosineSimilarity,
    Hinge,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    cosine_similarity,
    hinge,
    huber,
    mean_absolute_error,
    mean_squared_error,
)

__all__ = [
    "EPSILON",
    "ROWS",
    "TABLE",
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CosineSimilarity",
    "Hinge",
    "Huber",
    "KLDivergence",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Row",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "class_numbers",
    "cosine_similarity",
    "deserialize",
    "get",
    "hinge",
    "huber",
    "kl_divergence",
    "mae",
    "mean_absolute_error",
    "mean_squared_error",
    "mse",
    "row_of",
    "serialize",
    "sparse_categorical_crossentropy",
]

mse, mae = mean_squared_error, mean_absolute_error


@dataclass(frozen=True)
class Row:
    """A loss of the library.

    Attributes:
        targets: "values", "binary", "classes" (one-hot rows) or "class numbers": what "accuracy"
            compares with this loss.
        shares: Whether its predictions are probabilities of classes, from a softmax.
        aliases: Other names of it.
    """

    kind: type[Loss]
    targets: str = "values"
    shares: bool = False
    aliases: tuple[str, ...] = ()


ROWS: Mapping[Callable[..., Tensor], Row] = {
    binary_crossentropy: Row(BinaryCrossentropy, "binary", aliases=("bce",)),
    binary_focal_crossentropy: Row(BinaryFocalCrossentropy, "binary"),
    categorical_crossentropy: Row(CategoricalCrossentropy, "classes", shares=True),
    categorical_focal_crossentropy: Row(CategoricalFocalCrossentropy, "classes", shares=True),
    cosine_similarity: Row(CosineSimilarity),
    hinge: Row(Hinge),
    huber: Row(Huber),
    kl_divergence: Row(KLDivergence, "classes", aliases=("kld",)),
    mean_absolute_error: Row(MeanAbsoluteError, aliases=("mae",)),
    mean_squared_error: Row(MeanSquaredError, aliases=("mse",)),
    sparse_categorical_crossentropy: Row(
        SparseCategoricalCrossentropy, "class numbers", shares=True
    ),
}
TABLE: Mapping[str, Callable[..., Tensor]] = {
    name: function for function, row in ROWS.items() for name in (function.__name__, *row.aliases)
}
_BY_CLASS = {row.kind.__name__: function for function, row in ROWS.items()}


def row_of(loss: Any) -> Row | None:
    """Return the row of a library's loss, function or object; None for one's own."""
    function = loss.function if isinstance(loss, Loss) else loss
    return ROWS.get(function) if isinstance(function, Hashable) and callable(function) else None


def get(identifier: Any) -> Callable[[Any, Any], Tensor]:
    """Return a loss by name; return a function or Loss unchanged.

    Raises:
        UsageError: The name is unknown; the message lists the existing ones.
    """
    if isinstance(identifier, str):
        if identifier in _BY_CLASS:
            return _BY_CLASS[identifier]
        if identifier not in TABLE:
            raise unknown_name("loss", identifier, TABLE)
        return TABLE[identifier]
    if isinstance(identifier, type):
        raise UsageError(f"a loss is an object: make one with {identifier.__name__}()")
    if callable(identifier):
        function: Callable[[Any, Any], Tensor] = identifier
        return function
    raise UsageError(f"a loss is a name or a function (y_true, y_pred), not {identifier!r}")


def serialize(loss: Callable[[Any, Any], Tensor]) -> dict[str, Any]:
    """Describe a loss as plain data.

    Raises:
        UsageError: It is a user's object without `get_config`.
    """
    kinds = (Loss, *(row.kind for row in ROWS.values()))
    if not isinstance(loss, Loss) or type(loss) not in kinds:
        return objects.describe(loss, TABLE)
    return {"loss": objects.describe(loss.function, TABLE), "options": loss.get_config()}


def deserialize(config: Any, custom: Mapping[str, Any]) -> Callable[[Any, Any], Tensor]:
    """Return the loss that `serialize` described; `custom` has the user's own by name.

    Raises:
        UsageError: It is neither the library's nor in `custom`.
    """
    if isinstance(config, Mapping) and "loss" in config:
        function = objects.restore("loss", config["loss"], TABLE, custom)
        loss: Loss = objects.make(Loss, {"function": function, **(config.get("options") or {})})
        return loss
    return get(objects.restore("loss", config, TABLE, custom))
