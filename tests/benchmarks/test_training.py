"""Comparing training steps: programs that train alternately, and their report."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import training
from measure import alternation, jobs
from measure.alternation import Measured
from measure.environments import REPOSITORY
from measure.revision import Revision
from reports import goals, standings
from reports.goals import Figure, Standing
from trainers import TRAINERS
from workloads import WORKLOADS

from tests.cluster.processes import run

SCRIPT = str(REPOSITORY / "benchmarks" / "training.py")
NOW = Revision("2026-01-01T00:00:00Z", "abc1234")
HERE = {name: Path(sys.executable) for name in ("ours", "numpy")}


def _measured(trainer: str, ranks: int, median: float, loss: float = 2.0) -> Measured:
    return Measured(trainer, ranks, "", [loss] * 3, [median] * 4)


@pytest.mark.torture
def test_ours_beside_a_loop_in_one_process(tmp_path: Path) -> None:
    out = ("--seconds", "0.01", "--rounds", "2", "--out", str(tmp_path / "out"))
    cases = ("--cases", "small", "instructions")
    result = run([sys.executable, SCRIPT, *cases, *out], deadline=100)
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out.json").read_text())
    ours, loop, _ = written["standings"]
    assert (ours["contestant"], loop["contestant"]) == ("ours", "NumPy loop")
    assert loop["ratio"] == loop["median"] / ours["median"]
    assert ours["rate"] == 32 / ours["median"]
    np.testing.assert_allclose(ours["losses"], loop["losses"], rtol=1e-4)
    found = {each["what"]: each["value"] for each in written["figures"]}
    assert found["µs per instruction, kernel included"] > 0
    assert found["peak memory ÷ liveness bound"] >= 1
    assert "samples/s" in result.out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.torture
def test_processes_of_ours_share_a_step() -> None:
    """Both see their own samples; the step is over when the last one is done."""
    workload = replace(WORKLOADS["small"], sides=(("ours", 2),))
    (found,) = alternation.measure(workload, HERE, seconds=0.01, rounds=2, deadline=100)
    assert len(found.seconds) >= 2 * 3
    assert min(found.seconds) > 0
    assert found.figures["peak"] >= found.figures["bound"] > 0
    assert found.about.startswith("allreduce ")
    assert found.after is None


@pytest.mark.torture
def test_gradients_are_timed_alone() -> None:
    workload = replace(WORKLOADS["adamw-clipped"], sides=(("ours", 2),))
    (found,) = alternation.measure(workload, HERE, seconds=0.01, rounds=2, deadline=100)
    assert len(found.backward) == len(found.seconds)
    assert found.after is not None


@pytest.mark.torture
@pytest.mark.parametrize("trainer", ["devices", "threads"])
def test_replicas_of_one_process_share_a_step(trainer: str) -> None:
    workload = replace(WORKLOADS["small"], sides=((trainer, 2), ("ours", 2)))
    found, ranks = alternation.measure(
        workload, {**HERE, trainer: HERE["ours"]}, seconds=0.01, rounds=2, deadline=100
    )
    assert min(found.seconds) > 0
    # Those that meet have the losses of ranks, and from the second step on the others have not.
    assert found.losses[0] == pytest.approx(ranks.losses[0], rel=1e-5)
    assert (found.losses == pytest.approx(ranks.losses, rel=1e-5)) == (trainer == "devices")


def test_a_side_that_fails_is_told_with_its_last_words() -> None:
    """The loop knows nothing of convolutions."""
    workload = replace(WORKLOADS["conv"], sides=(("ours", 1), ("numpy", 1)))
    with pytest.raises(jobs.JobError, match="KeyError: 'conv'"):
        alternation.measure(workload, HERE, seconds=0.01, rounds=1, deadline=100)


def test_ranks_are_told_to_start_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "allreduce.run", "-n", "2", SCRIPT]
    result = run([*command, "--out", str(tmp_path / "out")], deadline=60)
    assert result.code == 1
    assert "starts all processes itself" in result.err


def test_ratios_are_of_sides_with_as_many_processes() -> None:
    found = [
        *(_measured("ours", 1, 1.0), _measured("ours", 2, 1.25)),
        *(_measured("pytorch", 1, 2.0), _measured("pytorch", 2, 1.875)),
        _measured("apart", 2, 1.25, loss=5.0),
    ]
    goals.check_losses("mlp", found)
    one, two, alone, together, apart = goals.standings("mlp", found, NOW)
    assert (one.ratio, two.ratio, alone.ratio, together.ratio) == (None, None, 2.0, 1.5)
    assert (one.met, alone.met, together.met) == (None, True, False)  # of 1.3 and 1.6
    assert (one.rate, two.rate) == (128, 256 / 1.25)
    assert (apart.ratio, apart.met) == (1, None)
    scaling, theirs, limit = goals.figures("mlp", found, NOW)
    assert (scaling.what, scaling.value, scaling.met) == ("weak scaling", 0.8, False)
    assert (theirs.what, theirs.met) == ("weak scaling of pytorch", None)
    assert (limit.what, limit.value) == ("weak scaling without communication", 0.8)


def test_devices_are_told_as_a_multiple_of_one() -> None:
    found = [
        *(_measured("ours", 1, 1.0), _measured("devices", 2, 1.25)),
        *(_measured("threads", 2, 1.0, loss=5.0), _measured("apart", 2, 1.25, loss=6.0)),
    ]
    goals.check_losses("devices", found)
    assert [each.rate for each in goals.standings("devices", found, NOW)][1:3] == [204.8, 256]
    made = {each.what: (each.value, each.met) for each in goals.figures("devices", found, NOW)}
    assert made == {
        "samples/s of 2 devices ÷ of one": (1.6, False),
        "samples/s of 2 threads that never meet ÷ of one": (2.0, None),
        "weak scaling without communication": (0.8, None),
    }


def test_figures_know_whether_less_is_better() -> None:
    told = {"peak": 105.0, "bound": 100.0, "waits": 1.2, "computes": 1.01, "instruction": 3e-7}
    found = [replace(_measured("ours", 1, 1.0), figures=told)]
    made = {each.what: each.met for each in goals.figures("small", found, NOW)}
    assert made == {
        "peak memory ÷ liveness bound": True,
        "step ÷ longer of input and compute, input waits": False,
        "step ÷ longer of input and compute, input computes": True,
        "µs per instruction, kernel included": True,
    }


def test_what_follows_the_backward_pass_is_compared_without_it() -> None:
    sides = [_measured("ours", 2, 3.0), _measured("pytorch-fused", 2, 8.0)]
    found = [replace(each, backward=[0.5, 1.0, 7.0]) for each in sides]
    (figure,) = goals.figures("adamw-clipped", found, NOW)
    assert figure.what == "reduce, clip and update: PyTorch, fused Adam ÷ ours"
    assert (figure.value, figure.met) == (3.5, True)


def test_digits_count_the_samples_of_all_processes() -> None:
    found = [_measured("ours", 2, 1.0), _measured("ours", 8, 1.6)]
    assert [each.rate for each in goals.standings("digits", found, NOW)] == [128, 80]
    (figure,) = goals.figures("digits", found, NOW)
    assert (figure.value, figure.met) == (0.625, False)
    own = [_measured("ours", 2, 1.0), _measured("ours", 8, 4.0)]
    (figure,) = goals.figures("digits-each", own, NOW)
    assert (figure.value, figure.met) == (1, True)


def test_who_does_other_work_is_found_out() -> None:
    goals.check_losses("mlp", [_measured("ours", 1, 1.0), _measured("numpy", 1, 1.0, 2.0001)])
    goals.check_losses("mlp", [_measured("ours", 1, 1.0), _measured("ours", 2, 1.0, 3.0)])
    with pytest.raises(AssertionError, match=r"step 0 of numpy has the loss 2\.01"):
        goals.check_losses("mlp", [_measured("ours", 1, 1.0), _measured("numpy", 1, 1.0, 2.01)])


def test_every_goal_is_about_a_side() -> None:
    for case, ranks, trainer in goals.RATIOS:
        assert {(trainer, ranks), ("ours", ranks)} <= {*WORKLOADS[case].sides}
    assert {name for each in WORKLOADS.values() for name, _ in each.sides} == {*TRAINERS}


def test_shares_of_processes_make_the_whole_batch() -> None:
    workload = WORKLOADS["digits"]
    whole = next(workload.batches(0, 1))
    shares = [next(workload.batches(rank, 8)) for rank in range(8)]
    for array, parts in zip(whole, zip(*shares, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), array)
    first, second = (next(WORKLOADS["mlp"].batches(rank, 2)) for rank in range(2))
    assert len(first[0]) == len(second[0]) == 128
    assert not np.array_equal(first[0], second[0])


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = [_measured("ours", 1, 1e-3), _measured("pytorch", 1, 1.2e-3)]
    standings.show(goals.standings("mlp", found, NOW), goals.figures("mlp", found, NOW))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-1][-3:] == ["1.2", "1.3", "NO"]


def _rows(case: str, *found: Measured) -> tuple[list[Standing], list[Figure]]:
    return goals.standings(case, found, NOW), goals.figures(case, found, NOW)


def test_other_cases_stay_in_the_file_with_their_dates(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert standings.read(out) == ([], [])
    large = _rows("mlp", _measured("ours", 1, 1e-3), _measured("ours", 2, 1.0))
    small = _rows("small", _measured("ours", 1, 1e-3))
    standings.save(*standings.merged(([], []), small), out, "one")
    standings.save(*standings.merged(standings.read(out), large), out, "both")
    assert standings.read(out) == (large[0] + small[0], large[1] + small[1])
    again = goals.standings("small", [_measured("ours", 1, 2e-3)], Revision("later", "def5678"))
    standings.save(*standings.merged(standings.read(out), (again, [])), out, "again")
    assert standings.read(out) == (large[0] + again, large[1])


def test_an_update_does_not_drop_peers(tmp_path: Path) -> None:
    """Their ratios would be missing, or be of another run of ours."""
    rows = _rows("small", _measured("ours", 1, 1e-3), _measured("pytorch", 1, 1.2e-3))
    standings.save(*rows, tmp_path / "out", "all")
    options = argparse.Namespace(out=tmp_path / "out", cases=["mlp", "small"])
    training.check_update(options, {"ours", "pytorch"})
    with pytest.raises(SystemExit, match=r"would drop PyTorch in MLP 64-64-10, batch 32; measure"):
        training.check_update(options, {"ours"})


def test_all_sides_begin_and_follow_different_ones() -> None:
    turn = [alternation.order_of(each, 3) for each in range(6)]
    assert turn == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 2, 1], [1, 2, 0], [2, 1, 0]]


def test_no_peer_is_asked_for_but_at_will(tmp_path: Path) -> None:
    here = {*("ours", "apart", "devices", "threads"), *("numpy", "bandwidth")}
    assert set(training.pythons([], tmp_path)) == here
