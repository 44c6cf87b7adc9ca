"""What `fit` is told beside the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from allreduce.errors import UsageError, did_you_mean

SHARDED, SAME = "sharded", "same"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of `Model.fit`, which says what they mean.

    Raises:
        UsageError: One is of another kind than its default, or out of range.
    """

    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    validation_data: Any = None
    shuffle: bool = True
    data: str = SAME

    def __post_init__(self) -> None:
        epochs = self.epochs
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 0:
            raise UsageError(f"epochs is an integer from 0, not {epochs!r}")
        if not isinstance(self.shuffle, bool | np.bool_):
            raise UsageError(f"shuffle is True or False, not {self.shuffle!r}")
        is_sharded(self.data)


def is_sharded(data: str) -> bool:
    """Tell whether each rank brings rows of its own.

    Raises:
        UsageError: `data` is neither of the two.
    """
    if not isinstance(data, str) or data not in (SAME, SHARDED):
        raise UsageError(
            f'data is "{SAME}" (every rank passes equal arrays) or "{SHARDED}" (its own), not '
            f"{data!r}{did_you_mean(data, (SAME, SHARDED))}"
        )
    return data == SHARDED
