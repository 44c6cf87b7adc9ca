"""The options of `fit`, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from allreduce.devices.integers import integer, switch
from allreduce.errors import UsageError, did_you_mean
from allreduce.training.arrays import check_class_weight

SHARDED, SAME = "sharded", "same"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of `fit`; `Model.fit` describes them."""

    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Collection[int] = 1
    data: str = SAME

    def __post_init__(self) -> None:
        integer("epochs", self.epochs, 0)
        integer("initial_epoch", self.initial_epoch, 0)
        for name in ("steps_per_epoch", "validation_steps"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1)
        switch("shuffle", self.shuffle)
        split = self.validation_split
        if isinstance(split, bool) or not isinstance(split, int | float) or not 0 <= split < 1:
            raise UsageError(
                f"validation_split is a share of the rows, from 0 to below 1, not {split!r}"
            )
        if split and self.validation_data is not None:
            raise UsageError("pass validation_split or validation_data, not both")
        freq: Any = self.validation_freq
        if isinstance(freq, Collection) and not isinstance(freq, str):
            for epoch in freq:
                integer("an epoch of validation_freq", epoch, 1)
        else:
            integer("validation_freq", freq, 1)
        check_class_weight(self.class_weight)
        is_sharded(self.data)

    def validates(self, epoch: int) -> bool:
        """Return whether to validate after an epoch, from 0; `validation_freq` counts from 1."""
        if isinstance(self.validation_freq, Collection):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0

    def settled(self) -> dict[str, Any]:
        """Return what has to be equal on all ranks."""
        plain = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps")
        found: dict[str, Any] = {name: _int(getattr(self, name)) for name in plain}
        found |= {"shuffle": bool(self.shuffle), "data": self.data}
        freq = self.validation_freq
        found["validation_freq"] = (
            sorted(map(int, freq)) if isinstance(freq, Collection) else int(freq)
        )
        found["validation_split"] = float(self.validation_split)
        weights = self.class_weight
        found["class_weight"] = weights and {int(key): float(weights[key]) for key in weights}
        return found


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def is_sharded(data: str) -> bool:
    """Return whether each rank brings rows of its own; refuse another text."""
    if not isinstance(data, str) or data not in (SAME, SHARDED):
        raise UsageError(
            f'data is "{SAME}" (every rank passes equal arrays) or "{SHARDED}" (its own), not '
            f"{data!r}{did_you_mean(data, (SAME, SHARDED))}"
        )
    return data == SHARDED
