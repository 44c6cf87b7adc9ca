"""Cut the rows of an epoch into parts, each the work of one worker at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allreduce.data import split_rows

_PARTS = 32  # of an epoch, for each worker: a dead one repeats little, and asking costs little
RowRange = tuple[int, int, int]  # the number of the pass over the rows, the first row and the end


@dataclass(frozen=True, slots=True)
class FitSpec:
    """What `fit` has to do; equal on all workers.

    Attributes:
        rows: The number of training samples.
        tests: The number of validation samples.
        batch_size: Rows of a step; of all shares of an update together if updates are synchronous.
        test_batch_size: Rows of a step of validation.
        first: The first epoch.
        epochs: The one behind the last.
        steps: The number of batches in an epoch; 0 for one pass over the rows.
        validated: The epochs after which to validate.
        micro_batches: The number of batches in an update of one worker.
        may_stop: Whether callbacks may end the training, so that workers wait for the chief's word.
        shuffle: Whether rows are taken in a drawn order.
        trained: The epochs that the model was trained for before, on which that order depends.
        samples: Describes the arrays, with checksums of some of their values.
    """

    rows: int
    tests: int
    batch_size: int
    test_batch_size: int
    first: int
    epochs: int
    steps: int = 0
    validated: tuple[int, ...] = ()
    micro_batches: int = 1
    may_stop: bool = False
    shuffle: bool = True
    trained: int = 0
    samples: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain data, which `of_json` reads."""
        return asdict(self)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> FitSpec:
        """Make what `as_json` described."""
        return cls(**{**found, "validated": tuple(found["validated"])})


def cut_validation(spec: FitSpec) -> list[RowRange]:
    """Return the parts of a validation: one for each of its batches."""
    return [(0, low, high) for low, high in _blocks(spec.tests, spec.test_batch_size)]


def cut_training(spec: FitSpec, epoch: int, workers: int, shares: int) -> list[RowRange]:
    """Return the parts of an epoch.

    Args:
        spec: What `fit` does.
        epoch: The epoch.
        workers: The number of workers in the cluster.
        shares: The number of shares of a synchronous update, each a part; 0 if updates are
            asynchronous, and a part has several batches.
    """
    batches = list(_blocks(spec.rows, spec.batch_size))
    numbers = range(len(batches))
    if spec.steps:
        done = (epoch - spec.first) * spec.steps
        numbers = range(done, done + spec.steps)
    found: list[RowRange] = []
    for number in numbers:
        turn, place = divmod(number, len(batches))
        low, high = batches[place]
        for rows in split_rows(high - low, shares) if shares else [high - low]:
            if rows:
                found.append((turn, low, low + rows))
            low += rows
    return found if shares else _joined(found, _batches_per_part(spec, workers))


def _batches_per_part(spec: FitSpec, workers: int) -> int:
    batches = spec.steps or -(-spec.rows // spec.batch_size)
    fair = max(1, batches // (_PARTS * workers))
    return -(-fair // spec.micro_batches) * spec.micro_batches


def _blocks(rows: int, size: int) -> list[tuple[int, int]]:
    return [(low, min(low + size, rows)) for low in range(0, rows, size)]


def _joined(batches: list[RowRange], most: int) -> list[RowRange]:
    """Join up to `most` neighbouring batches of one pass to a part."""
    found: list[RowRange] = []
    joined = 0
    for turn, low, high in batches:
        if joined and joined < most and found[-1][0] == turn:
            found[-1] = turn, found[-1][1], high
            joined += 1
        else:
            found.append((turn, low, high))
            joined = 1
    return found
