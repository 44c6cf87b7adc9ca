"""Each row of an epoch counts once, also if workers die; updates drop stale gradients."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from allreduce.parameters.aggregation import Aggregation
from allreduce.parameters.dealing import TRAIN, VALIDATE, Answer, Fit
from allreduce.parameters.row_ranges import FitSpec

KINDS = [["loss", "mean"]]
SPEC = FitSpec(rows=1000, tests=90, batch_size=32, test_batch_size=40, first=0, epochs=2)


def ask(fit: Fit, worker: str, seen: int = 0, *, stops: bool = False) -> Answer:
    return fit.next(worker, seen, is_chief=worker == "a", stops=stops, timeout=0.0)


def report(fit: Fit, worker: str, answer: Answer) -> bool:
    """Finish a part whose loss is 1 for each row."""
    found = answer.fields
    rows = np.asarray(float(found["stop"] - found["start"]))
    return fit.finish(worker, found["part"], found["epoch"], KINDS, [rows, rows])


def test_parts_cover_an_epoch_and_the_sums_come_back() -> None:
    fit = Fit(SPEC, workers=2)
    rows: list[int] = []
    for turn in range(1000):
        worker = "ab"[turn % 2]
        answer = ask(fit, worker)
        if answer.what != TRAIN:
            break
        rows += range(answer.fields["start"], answer.fields["stop"])
        report(fit, worker, answer)
    assert sorted(rows) == list(range(1000))
    assert answer.what == "epoch"
    assert answer.fields == {"epoch": 0, TRAIN: KINDS}
    assert [float(each) for each in answer.arrays] == [1000.0, 1000.0]


def test_a_dead_workers_rows_go_to_others_once() -> None:
    fit = Fit(SPEC, workers=2)
    dead = ask(fit, "b")
    assert fit.lose("b", is_chief=False) == 1
    assert ask(fit, "a").fields == dead.fields
    assert not report(fit, "b", dead)  # it was cut off, and lives
    assert report(fit, "a", dead)
    assert not report(fit, "a", dead)
    while (answer := ask(fit, "a")).what == TRAIN:
        report(fit, "a", answer)
    assert float(answer.arrays[0]) == 1000.0


def test_a_dead_worker_that_was_waiting_gets_nothing() -> None:
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 32}), workers=2)
    part = ask(fit, "b")
    answers: list[Answer] = []

    def wait() -> None:
        answers.append(fit.next("c", 0, is_chief=False, stops=False, timeout=25.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    fit.lose("c", is_chief=False)  # its connection has ended, and its question waits
    fit.lose("b", is_chief=False)
    assert ask(fit, "a").fields == part.fields
    report(fit, "a", part)  # after which there are sums to tell
    waiting.join(50.0)
    assert answers[0].what != TRAIN


def test_validation_follows_its_epochs() -> None:
    spec = FitSpec(**{**SPEC.as_json(), "validated": (1,)})
    fit, seen, phases = Fit(spec, workers=1), 0, []
    while (answer := ask(fit, "a", seen)).what != "end":
        if answer.what == "epoch":
            phases.append(sorted(set(answer.fields) - {"epoch"}))
            seen += 1
        else:
            report(fit, "a", answer)
    assert phases == [[TRAIN], [TRAIN, VALIDATE]]


def test_the_chiefs_callbacks_stop_all_workers() -> None:
    spec = FitSpec(**{**SPEC.as_json(), "rows": 32, "may_stop": True})
    fit = Fit(spec, workers=2)
    report(fit, "b", ask(fit, "b"))
    assert ask(fit, "b", 0).what == "epoch"
    assert ask(fit, "b", 1).what == "wait"  # for the chief's word
    assert ask(fit, "a", 1, stops=True).what == "end"
    assert ask(fit, "b", 1).what == "end"


def test_nobody_waits_for_a_dead_chiefs_word() -> None:
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 32, "may_stop": True}), workers=2)
    report(fit, "b", ask(fit, "b"))
    fit.lose("a", is_chief=True)
    assert ask(fit, "b", 1).what == TRAIN


def test_epochs_of_some_steps_go_on_in_the_rows() -> None:
    spec = FitSpec(**{**SPEC.as_json(), "rows": 96, "steps": 2})
    fit, seen, found = Fit(spec, workers=1), 0, []
    while (answer := ask(fit, "a", seen)).what != "end":
        if answer.what == "epoch":
            seen += 1
            continue
        found.append([answer.fields[name] for name in ("turn", "start", "stop")])
        report(fit, "a", answer)
    assert found == [[0, 0, 32], [0, 32, 64], [0, 64, 96], [1, 0, 32]]


def test_synchronous_shares_are_those_of_one_batch() -> None:
    syncs = Aggregation(2, 2)
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 49}), 2, syncs)
    first, second = ask(fit, "a"), ask(fit, "b")
    assert [first.fields[n] for n in ("start", "stop", "update", "of")] == [0, 16, 0, 2]
    assert second.fields["start"] == 16
    assert ask(fit, "a").what == "wait"
    report(fit, "a", first)
    assert ask(fit, "a").what == "wait"
    fit.lose("b", is_chief=False)
    again = ask(fit, "a")
    assert again.fields["part"] == second.fields["part"]
    report(fit, "a", again)
    last = ask(fit, "a")  # of 17 rows that are left
    assert [last.fields[n] for n in ("start", "stop", "update")] == [32, 41, 1]


def test_a_synchronous_update_takes_the_shares_of_one_batch_only() -> None:
    changed = {"rows": 26, "batch_size": 24, "steps": 3, "epochs": 1}  # batches of 24, 2 and 24
    fit = Fit(FitSpec(**{**SPEC.as_json(), **changed}), 1, Aggregation(4, 4))
    sizes = []
    while (answer := ask(fit, "a")).what == TRAIN:
        sizes.append(answer.fields["of"])
        report(fit, "a", answer)
    assert sizes == [4] * 4 + [2] * 2 + [4] * 4


def test_an_update_under_way_is_cancelled_when_a_worker_knows_a_later_epoch() -> None:
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 64}), 2, Aggregation(2, 2))
    for _ in range(2):
        report(fit, "a", ask(fit, "a"))
    under_way = ask(fit, "a")
    fit.learn([({"epoch": 0, TRAIN: KINDS}, [np.asarray(64.0)] * 2)])
    assert not report(fit, "a", under_way)
    while (answer := ask(fit, "b", 1)).what == TRAIN:
        report(fit, "b", answer)
    assert answer.what == "epoch"


def test_backup_workers_are_not_waited_for() -> None:
    syncs = Aggregation(1, 2)
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 64, "epochs": 1}), 2, syncs)
    fast, slow = ask(fit, "a"), ask(fit, "b")
    assert fit.claim("a", fast.fields["part"], fast.fields["update"])
    report(fit, "a", fast)
    assert not fit.claim("b", slow.fields["part"], slow.fields["update"])
    assert syncs.dropped == 1
    again = ask(fit, "b")  # the same rows, with the new parameters
    assert again.fields["part"] == slow.fields["part"]
    assert fit.claim("b", again.fields["part"], again.fields["update"])
    report(fit, "b", again)
    assert float(ask(fit, "a").arrays[0]) == 64.0


def test_a_backup_computes_the_last_parts_of_slow_workers_again() -> None:
    syncs = Aggregation(2, 3)
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 32, "epochs": 1}), 3, syncs)
    stopped, fast = ask(fit, "b"), ask(fit, "a")
    assert fit.claim("a", fast.fields["part"], fast.fields["update"])
    report(fit, "a", fast)
    again = ask(fit, "a")
    assert again.fields == stopped.fields
    assert ask(fit, "a").what == "wait"
    assert fit.claim("a", again.fields["part"], again.fields["update"])
    assert not fit.claim("b", stopped.fields["part"], stopped.fields["update"])
    report(fit, "a", again)
    assert not report(fit, "b", stopped)
    assert not fit.claim("b", stopped.fields["part"], stopped.fields["update"])
    assert syncs.dropped == 2
    assert float(ask(fit, "a").arrays[0]) == 32.0


def test_a_share_whose_worker_has_died_is_given_by_its_backup() -> None:
    syncs = Aggregation(1, 2)
    fit = Fit(FitSpec(**{**SPEC.as_json(), "rows": 32, "epochs": 1}), 2, syncs)
    dead, backup = ask(fit, "b"), ask(fit, "a")
    assert fit.claim("b", dead.fields["part"], dead.fields["update"])
    fit.lose("b", is_chief=False)  # some servers may have its gradient
    assert ask(fit, "c").fields == backup.fields
    assert fit.claim("a", backup.fields["part"], backup.fields["update"])
    report(fit, "a", backup)
    assert float(ask(fit, "a").arrays[0]) == 32.0


@pytest.mark.parametrize("done", [0, 5, 40])
def test_a_restored_call_goes_on_where_it_was(done: int) -> None:
    fit = Fit(SPEC, workers=2)
    for _ in range(done):
        answer = ask(fit, "a", fit.epoch)
        if answer.what == TRAIN:
            report(fit, "a", answer)
    ask(fit, "b", fit.epoch)  # under way, and thus not done
    fields, arrays = fit.state()
    again, seen, rows = Fit.restored(json.loads(json.dumps(fields)), arrays), 0, []
    while (answer := ask(again, "a", seen)).what != "end":
        if answer.what == "epoch":
            rows.append(float(answer.arrays[0]))
            seen += 1
        else:
            report(again, "a", answer)
    assert rows == [1000.0, 1000.0]
