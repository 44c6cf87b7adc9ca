"""Ranks without samples, and failing ranks, leave no rank waiting and no wrong values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness import run_ranks


def ranks() -> None:
    import json
    from typing import Any

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, ops = strategy.communicator.rank, ar.ops
    with strategy.scope():
        total = ar.Variable(np.zeros(1 << 16), name="total")

    @ar.function
    def step(x: Any) -> Any:
        everyones = ar.all_reduce(ops.sum(x, axis=0))
        own = ops.sum(x - everyones)
        total.assign(everyones * 1.5)
        return own

    def run(fn: Any, *arrays: np.ndarray) -> Any:
        (batch,) = strategy.distribute_dataset([arrays])
        return strategy.run(fn, args=batch)

    found: list[Any] = []
    for number in (1.0, 2.0):
        run(step, np.full((2, 1 << 16), number))
        found.append(np.unique(total.numpy()).tolist())

    def returning(x: Any) -> Any:
        everyones = ar.all_reduce(ops.sum(x))
        return (everyones, x) if rank == 0 else x

    def labelled(x: Any, labels: Any) -> Any:
        return ar.all_reduce(ops.sum(ops.one_hot(labels, 3) * x))

    labels = np.zeros(3, np.int64)
    labels[1] = 9  # a bad one on rank 1, which goes on as if nothing had been
    for fn, arrays in [
        (returning, (np.ones((3, 1)),)),
        (labelled, (np.ones((3, 1)), labels)),
        (labelled, (np.ones((3, 1)), labels * 0)),
    ]:
        try:
            run(fn, *arrays)
            found.append("went on")
        except ar.AllreduceError as error:
            notes = getattr(error, "__notes__", ["nothing"])
            found.append([type(error).__name__, str(error), notes[0]])
    print(json.dumps(found))


def test_ranks_without_samples_and_ranks_that_fail_leave_nobody_waiting_or_wrong() -> None:
    results = run_ranks(ranks, 3, timeout=30)
    for rank, result in enumerate(results):
        assert result.returncode == 0, result.stderr
        first, second, alone, bad, after = json.loads(result.stdout.splitlines()[-1])
        assert (first, second) == ([3.0], [6.0])
        assert alone[0] == "MismatchError", alone
        assert "of the step is float64 (batch, 1) on rank 0 but missing on ranks 1, 2" in alone[1]
        if rank == 1:
            assert bad[0] == "UsageError"
            assert "label 9" in bad[1]
        else:
            assert bad[0] == "PeerLostError", bad
            assert "replica 1 raised UsageError" in bad[1]
            assert "label 9" in bad[1]
            assert re.match(r"operator 'all_reduce' at .*\.py:\d+", bad[2])
        assert after[0] == "ClosedError", "no step is mixed with another rank's other step"


def cannot_make_a_step() -> None:
    import json
    from typing import Any

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, ops = strategy.communicator.rank, ar.ops
    with strategy.scope():
        w = ar.Variable(np.ones((4, 3), np.float32), name="w")
        optimizer = ar.optim.Adam()
        model = ar.nn.Sequential([ar.nn.Input((4,)), ar.nn.Dense(1)])
        model.compile("sgd", "mse")
    (batch,) = strategy.distribute_dataset([(np.ones((8, 4), np.float32),)])

    def step(x: Any) -> None:
        optimizer.minimize(ops.sum(x @ w, axis=1), [w])

    def bad(x: Any) -> Any:
        return x @ w @ w

    grouped = ar.optim.SGD(0.1, groups=lambda _: {"momentun": 0.5})

    def misgrouped(x: Any) -> None:
        grouped.minimize(ops.sum(x @ w, axis=1), [w])

    found: list[str] = []

    def run(fn: Any) -> None:
        try:
            strategy.run(fn, batch)
            found.append("ran")
        except ar.AllreduceError as error:
            notes = getattr(error, "__notes__", [])
            found.append(f"{type(error).__name__} {error} {notes}")

    for fn in (bad, step, bad, 7, misgrouped, step):  # on all ranks alike
        run(fn)
    run(bad if rank == 1 else step)
    strategy.communicator.barrier()  # the others learn of it while rank 1 continues
    try:
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    except ar.ClosedError as error:
        found.append(str(error))
    strategy.communicator.close()
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w, optimizer = ar.Variable(np.ones((4, 3), np.float32)), ar.optim.Adam()
    run(bad if rank == 1 else step)
    print(json.dumps(found))


def test_a_rank_that_cannot_make_a_step_tells_those_that_can() -> None:
    results = run_ranks(cannot_make_a_step, 2)  # whose deadline comes before a wait's timeout
    assert [result.returncode for result in results] == [0, 0], results
    told = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    for texts in told:
        assert texts[0] == texts[2]
        assert texts[0].startswith("ShapeError "), texts
        assert (texts[1], texts[5]) == ("ran", "ran")
        assert texts[3].startswith("UsageError run takes a function"), texts
        assert "unknown hyperparameter 'momentun'" in texts[4], texts
        assert "runs no steps any more, as " in texts[7], texts
    assert told[1][6].startswith("ShapeError ")
    others = told[0][6]
    assert others.startswith("MismatchError "), others
    first = told[0][8]  # of another strategy
    assert "exchange(the first step) at " in first
    for text in (others, first):
        assert "but exchange(no step: this rank raised ShapeError) at " in text
        assert "replica 1 raised:" in text
        assert "return x @ w @ w" in text


def leaves_before_the_first_step() -> None:
    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    if strategy.communicator.rank == 1:
        return
    (batch,) = strategy.distribute_dataset([np.ones((4, 1), np.float32)])
    try:
        strategy.run(lambda x: ar.all_reduce(ar.ops.sum(x)), args=(batch,))
    except ar.PeerLostError as error:
        print(error)


def test_a_rank_that_leaves_before_the_first_step_is_missed_at_once() -> None:
    first, second = run_ranks(leaves_before_the_first_step, 2)  # before a wait's timeout
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "rank 1" in first.stdout
    assert "left normally" in first.stdout
    assert "exchange(the first step)" in first.stdout


def gathers_rows_that_a_rank_does_not_know() -> None:
    import json
    from typing import Any

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    with strategy.scope():
        w = ar.Variable(np.ones(1), name="w")
        optimizer = ar.optim.SGD(1.0)

    def gathered(x: Any) -> Any:
        return ar.ops.sum(ar.all_gather(x) * w)

    def trained(x: Any) -> Any:
        loss = x @ w * ar.ops.sum(ar.all_gather(x))
        optimizer.minimize(loss, [w])
        return ar.ops.sum(loss)

    rows = np.ones((3, 1))
    (known,) = strategy.distribute_dataset([rows])
    own = ar.PerReplica((rows[rank * 2 : rank * 2 + 2],))  # the same, without the others' number
    one = known if rank == 0 else own
    runs = [(gathered, eagerly, batch) for eagerly in (False, True) for batch in (one, own, known)]
    found: list[Any] = []
    for fn, eagerly, batch in [*runs, (trained, False, one), (trained, False, known)]:
        try:
            given = strategy.run(fn, args=(batch,), eagerly=eagerly)
            found.append(float(strategy.local_results(given)[0]))
        except ar.AllreduceError as error:
            found.append(str(error))
    print(json.dumps(found))


def test_rows_that_one_rank_does_not_know_are_refused_on_all_and_all_go_on() -> None:
    results = run_ranks(gathers_rows_that_a_rank_does_not_know, 2, timeout=40)
    for rank, result in enumerate(results):
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout.splitlines()[-1])
        for kind in range(2):
            one, both, right = found[kind * 3 : kind * 3 + 3]
            assert one.startswith(
                f"rank {rank}: the number of rows of all replicas, which the step"
            )
            assert "gathers, is known on rank 0 but not known on rank 1; make the batches" in one
            assert "is not known on any rank; make the batches" in both
            assert right == 3.0
        assert "how many there are is not known" in found[-2], "an optimizer's step compares less"
        assert "runs no steps any more" in found[-1]


def goes_on_with_another_strategy(where: str) -> None:
    import json
    import traceback
    from typing import Any

    import numpy as np

    import allreduce as ar

    def kernel(out: Any, inputs: Any, attrs: Any) -> None:
        if rank == 1 and failing:
            raise ArithmeticError("the kernel's own")
        out[...] = inputs[0]

    bad = ar.register_op("bad", shape=lambda specs, attrs: specs[0], cpu=kernel)

    def step(x: Any) -> Any:
        return ar.all_reduce(ar.ops.sum(bad(x) * w))

    def run(eagerly: bool = False) -> str:
        (batch,) = strategy.distribute_dataset([np.ones((4, 1))])
        try:
            given = strategy.run(step, args=(batch,), eagerly=eagerly)
            return str(strategy.local_results(given)[0])
        except Exception as error:
            return "".join(traceback.format_exception(error))

    found: list[str] = []
    for attempt in range(2):
        failing = attempt == 0
        strategy = ar.MultiWorkerMirroredStrategy()
        rank = strategy.communicator.rank
        with strategy.scope():
            w = ar.Variable(np.ones(1), name="w")
        found += [run(where == "eager"), run(), str(w.numpy())]
        strategy.close()
    found.append(run())
    print(json.dumps(found))


@pytest.mark.parametrize("where", ["traced", "eager"])
def test_an_error_of_one_rank_shows_its_traceback_on_all_and_what_to_do(where: str) -> None:
    results = run_ranks(goes_on_with_another_strategy, 2, timeout=30, arguments=[where])
    for rank, result in enumerate(results):
        assert result.returncode == 0, result.stderr
        first, again, value, *others, closed = json.loads(result.stdout.splitlines()[-1])
        if rank == 0:
            assert "PeerLostError: [shared] rank 0: rank 1 aborted the communicator" in first
            assert "replica 1 raised:\nTraceback (most recent call last):" in first
        assert re.search(r'File ".*program.py", line \d+, in kernel', first), first
        assert "ArithmeticError: the kernel's own" in first
        last = again.splitlines()[-1]
        assert "ClosedError" in again
        assert "runs no steps any more, as " in last
        assert "the kernel's own" in last
        assert "make another strategy, on every rank" in last
        assert value == "[1.]"
        assert others == ["4.0", "4.0", "[1.]"]
        assert "runs no steps any more, as it was closed. Its variables can still be" in closed


def unprintable(folder: str) -> None:
    import time
    from pathlib import Path

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank, told = strategy.communicator.rank, Path(folder) / "told"

    def step(x: ar.Tensor) -> object:
        if rank == 1:
            raise ValueError("no file " + b"caf\xe9".decode(errors="surrogateescape"))
        return ar.all_reduce(x)

    try:
        strategy.run(step, args=(np.ones(2),), eagerly=True)
    except (ValueError, ar.AllreduceError) as error:
        print(type(error).__name__)
    if rank == 0:
        told.touch()
    while not told.exists():  # leaving would inform the other one, too
        time.sleep(0.01)


def test_an_error_that_no_text_can_be_made_of_is_told_at_once(tmp_path: Path) -> None:
    results = run_ranks(unprintable, 2, arguments=(str(tmp_path),))
    assert [result.stdout for result in results] == ["PeerLostError\n", "ValueError\n"]
