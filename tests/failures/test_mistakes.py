"""Mistakes in whole jobs: each ends at once, names the remedy, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.processes import Result
from tests.failures import mistakes
from tests.failures.jobs import start

SCRIPT = Path(mistakes.__file__)


def commit(mistake: str, launcher: str, folder: Path) -> Result:
    """Run a mistake on two ranks."""
    temporary = folder / "tmp"
    temporary.mkdir()
    with start(launcher, 2, SCRIPT, mistake, str(folder), folder=temporary) as job:
        result = job.process.finish(60)
        job.assert_nothing_left()
    assert result.code == 1, result
    return result


# What a launcher does at such an end is proved by the mistakes that are its own.
UNDER_THE_OTHER = (
    ("mirrored_in_a_larger_world", "mpirun", "UsageError", "ar.MultiWorkerMirroredStrategy()"),
    ("fit_without_a_strategy", "run", "UsageError", "of 2: the model was made without"),
    ("a_label_in_one_ranks_rows", "mpirun", "UsageError", "label 3 in row"),
    ("different_models", "run", "MismatchError", "is 8 on rank 0 but 9 on rank 1"),
    ("a_model_that_one_rank_has_no_memory_for", "mpirun", "OutOfMemoryError", "rank 1 got"),
)


@pytest.mark.parametrize(
    ("mistake", "launcher", "kind", "words"),
    [
        ("mirrored_in_a_larger_world", "run", "UsageError", "ar.MultiWorkerMirroredStrategy()"),
        ("fit_without_a_strategy", "mpirun", "UsageError", "of 2: the model was made without"),
        ("init_with_other_arguments", "mpirun", "UsageError", "again with timeout=7"),
        ("use_after_close", "run", "ClosedError", "is closed"),
        ("unknown_optimizer", "run", "UsageError", "did you mean 'adam'?"),
        ("a_label_in_one_ranks_rows", "run", "UsageError", "label 3 in row"),
        ("a_nan_in_one_ranks_rows", "mpirun", "NumericsError", "NaN in epoch 1, step 2"),
        (
            "different_arrays",
            "run",
            "MismatchError",
            "has one value on rank 0 but another on rank 1",
        ),
        ("different_models", "mpirun", "MismatchError", "is 8 on rank 0 but 9 on rank 1"),
        ("different_seeds", "mpirun", "MismatchError", "rank 1 has seed 1 but rank 0 has 0"),
        ("different_calls", "run", "MismatchError", "rank 1"),
        (
            "a_place_to_save_to_that_takes_no_file",
            "run",
            "UsageError",
            "save on rank 1: cannot save to /proc/model: No such file or directory; name a file",
        ),
        ("a_variable_of_no_scope", "mpirun", "UsageError", "'weight'"),
        ("a_truncated_model_on_one_rank", "run", "UsageError", "truncated"),
        (
            "symmetric_memory_that_nobody_has",
            "mpirun",
            "OutOfMemoryError",
            "140737488355328 per member",
        ),
        ("a_model_that_one_rank_has_no_memory_for", "run", "OutOfMemoryError", "rank 1 got"),
        *(pytest.param(*row, marks=pytest.mark.torture) for row in UNDER_THE_OTHER),
    ],
)
def test_a_mistake_is_named(
    mistake: str, launcher: str, kind: str, words: str, tmp_path: Path
) -> None:
    result = commit(mistake, launcher, tmp_path)
    lines = [line for line in result.err.splitlines() if f".{kind}: " in line]
    assert lines, result.err
    assert words in lines[0], lines
    assert "Bus error" not in result.err
    assert "SIGBUS" not in result.err
