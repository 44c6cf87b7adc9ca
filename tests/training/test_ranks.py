"""The fit loop over several processes: equal results, agreement, errors on every rank."""

from __future__ import annotations

import json
import sys
from collections import abc
from typing import Any

import numpy as np
import pytest

from tests import netns
from tests.harness import Result, clean_environment, run_commands, run_ranks, script_of

Told = abc.Mapping[str, list[Any]]  # what the ranks printed, by the function that they called


def printed(results: list[Result]) -> list[Any]:
    """Read the JSON of each rank's last line."""
    for result in results:
        assert result.returncode == 0, result.stderr
    return [json.loads(result.stdout.splitlines()[-1]) for result in results]


def train(hosts: str) -> None:
    import json
    import os

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    if hosts:
        os.environ["ALLREDUCE_HOST"] = hosts[int(os.environ["ALLREDUCE_RANK"])]
    strategy = ar.MultiWorkerMirroredStrategy()
    rank, size = strategy.communicator.rank, strategy.communicator.size
    x, y = blobs(50)
    with strategy.scope():
        model = classifier(dropout=0.2)
    history = model.fit(x, y, batch_size=16, epochs=3, validation_data=(x[:7], y[:7]), verbose=0)
    outputs = model.predict(x[:10], batch_size=7, verbose=0)
    with strategy.scope():
        sharded = classifier()
    # Rank r brings rows r, r + size, …; with one row less on later ranks where they do not divide.
    own = slice(rank, None, size)
    per_rank = sharded.fit(x[own], y[own], batch_size=2 * size, verbose=0, data="sharded").history
    measured = sharded.evaluate(x[own], y[own], verbose=0, data="sharded")
    whole = sharded.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(measured, whole, rtol=1e-6)
    weights = [value.tolist() for value in model.get_weights()]
    transport = strategy.communicator.transport
    print(json.dumps([history.history, outputs.tolist(), weights, per_rank, transport]))


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What one rank computes."""
    (found,) = printed(run_ranks(train, 1, arguments=("",)))
    return list(found)


def same_as_alone(ranks: list[Any], alone: list[Any], transport: str) -> None:
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][-1] == transport
    for name, values in alone[0].items():
        assert ranks[0][0][name] == pytest.approx(values, rel=1e-6)
    assert np.shape(ranks[0][1]) == (10, 3)
    np.testing.assert_allclose(ranks[0][1], alone[1], rtol=1e-4, atol=1e-6)


def test_ranks_agree_with_each_other_and_with_one(told: Told, alone: list[Any]) -> None:
    same_as_alone(told["train"], alone, "shared")


def test_ranks_on_two_hosts_agree_with_each_other_and_with_one(alone: list[Any]) -> None:
    ranks = printed(run_ranks(train, 3, arguments=("aab",)))
    same_as_alone(ranks, alone, "hierarchical")


@pytest.mark.torture  # with the hosts made up, above, it is the same
def test_ranks_in_networks_of_their_own_agree_with_one(alone: list[Any]) -> None:
    with netns.hosts(2) as two:
        ranks = netns.explicit_ranks(two, 2)
        results = run_commands(
            [host.command(sys.executable, "-c", script_of(train, "")) for host, _ in ranks],
            [{**clean_environment(), **own} for _, own in ranks],
            60,
        )
    same_as_alone(printed(results), alone, "hierarchical")


def replicas_in_threads_or_processes(threads: int) -> None:
    import json

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    if threads:
        ar.config.set_logical_devices("CPU", threads)
    strategy = ar.MirroredStrategy() if threads else ar.MultiWorkerMirroredStrategy()
    x, y = blobs(50)
    with strategy.scope():
        model = classifier(dropout=0.2)
    history = model.fit(x, y, batch_size=14, epochs=2, validation_data=(x, y), verbose=0)
    weights = [value.tolist() for value in model.get_weights()]
    print(json.dumps([history.history, weights]))


def test_threads_and_processes_agree_to_the_bit(told: Told) -> None:
    (threads,) = printed(run_ranks(replicas_in_threads_or_processes, 1, arguments=(3,)))
    assert told["replicas_in_threads_or_processes"] == [threads] * 3


def differ() -> None:
    import json

    import allreduce as ar
    from tests.nn.common import blobs

    strategy = ar.MultiWorkerMirroredStrategy()
    other = strategy.communicator.rank == 1
    x, y = blobs(20)
    wrong = y.copy()
    wrong[3] = (y[3] + 1) % 3
    SGD, nn = ar.optim.SGD, ar.nn

    mine: list[tuple[str, Any, Any, dict[str, Any], dict[str, Any]]] = [
        ("fit", x, wrong, {}, {}),
        ("fit", x[:-1], y[:-1], {}, {}),
        ("fit", x, y, {"batch_size": 9}, {}),
        ("fit", x, y, {"validation_data": (x, y)}, {}),
        ("fit", x, y, {"validation_data": (x[:7], y[:7])}, {}),
        ("fit", x, y, {}, {"optimizer": ar.optim.Adam(0.1)}),
        ("fit", x, y, {}, {"optimizer": SGD(0.2)}),
        ("fit", x, y, {}, {"loss": nn.losses.SparseCategoricalCrossentropy(from_logits=True)}),
        ("fit", x, y, {}, {"metrics": ["accuracy"]}),
        ("fit", x, y, {}, {"activation": "tanh"}),
        ("fit", x, y, {}, {"rate": 0.5}),
        ("fit", x.astype("float64"), y, {}, {}),
    ]
    calls = mine if other else [("fit", x, y, {}, {}) for _ in mine]
    calls[4][3].setdefault("validation_data", (x[:9], y[:9]))
    found = []
    for number, (method, samples, labels, options, made) in enumerate(calls, 1):
        if number == len(mine):
            options["data"] = "sharded"
        with strategy.scope():
            model = nn.Sequential()
            model.add(nn.Dense(4, activation=made.pop("activation", "relu")))
            model.add(nn.Dropout(made.pop("rate", 0.25)))
            model.add(nn.Dense(3, activation="softmax"))
        usual = {"optimizer": SGD(0.1), "loss": "sparse_categorical_crossentropy", "metrics": []}
        model.compile(**{**usual, **made})
        try:
            getattr(model, method)(samples, labels, **{"batch_size": 8, "verbose": 0, **options})
        except ar.MismatchError as error:
            found.append(str(error))
    print(json.dumps(found))


NOT_THE_SAME = [
    "y, int64 (20,), has one value on ranks 0, 2 but another on rank 1; load the same",
    "x is float32 (20, 6) on ranks 0, 2 but float32 (19, 6) on rank 1"
    '; load the same on every rank, in the same order, or pass data="sharded" if each rank has',
    "batch_size is 8 on ranks 0, 2 but 9 on rank 1; pass the same",
    "validation x is None on ranks 0, 2 but float32 (20, 6) on rank 1; "
    'pass the same validation_data on every rank, or on none; only with data="sharded" each rank',
    "validation x is float32 (9, 6) on ranks 0, 2 but float32 (7, 6) on rank 1; pass the same",
    "the optimizer is SGD(learning_rate=0.1, momentum=0.0, nesterov=False) on ranks 0, 2 but Adam(",
    "the optimizer is SGD(learning_rate=0.1, momentum=0.0, nesterov=False) on ranks 0, 2 but SGD("
    "learning_rate=0.2, momentum=0.0, nesterov=False) on rank 1; make and compile the same model",
    "the loss is sparse_categorical_crossentropy on ranks 0, 2 but sparse_categorical_crossentropy"
    "(from_logits=True) on rank 1",
    "the list of metrics is [] on ranks 0, 2 but [accuracy] on rank 1",
    "activation of layer 0 (Dense) is 'relu' on ranks 0, 2 but 'tanh' on rank 1",
    "rate of layer 1 (Dropout) is 0.25 on ranks 0, 2 but 0.5 on rank 1",
    "x is float32 (rows, 6) on ranks 0, 2 but float64 (rows, 6) on rank 1",
]


def test_ranks_that_pass_or_made_different_things_are_told_which(told: Told) -> None:
    for rank, messages in enumerate(told["differ"]):
        for message, named in zip(messages, NOT_THE_SAME, strict=True):
            assert message.startswith(f"fit on rank {rank}: {named}")


def weights_of_one_rank() -> None:
    import json

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    x, y = blobs(20)
    with strategy.scope():
        model = classifier()
    model.build((None, 6))

    def set_on_one_rank() -> None:
        if strategy.communicator.rank == 1:
            model.set_weights([weight + 1 for weight in model.get_weights()])

    set_on_one_rank()
    model.fit(x, y, verbose=0)
    weights = [value.tolist() for value in model.get_weights()]
    set_on_one_rank()
    try:
        model.fit(x, y, verbose=0)
    except ar.MismatchError as error:
        print(json.dumps([weights, str(error)]))


def test_weights_set_on_one_rank_are_noticed(told: Told) -> None:
    weights, messages = zip(*told["weights_of_one_rank"], strict=True)
    assert all(each == weights[0] for each in weights)  # before a first step all take replica 0's
    for rank, message in enumerate(messages):
        assert message.startswith(f"fit on rank {rank}: the value of the model's variables has ")
        assert "has one value on ranks 0, 2 but another on rank 1; call set_weights" in message


def nan_on_one_rank() -> None:
    import json

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    x, y = blobs(40)
    x[39] = np.nan  # the last row of the second batch: the last rank's
    with strategy.scope():
        model = classifier()
    try:
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    except ar.NumericsError as error:
        print(json.dumps(str(error)))


def test_a_nan_on_one_rank_is_raised_on_all(told: Told) -> None:
    for rank, message in enumerate(told["nan_on_one_rank"]):
        assert message.startswith(
            f"fit on rank {rank}: the loss became NaN in epoch 1, step 2 (first on rank 2)"
        )


def no_strategy() -> None:
    import json

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    found = []
    try:
        classifier().fit(*blobs(20), verbose=0)
    except ar.UsageError as error:
        found.append(str(error))
    with strategy.scope():
        model = classifier()
        for refused in (lambda: model.compile("sdg", "mse"), lambda: ar.nn.load_model("none")):
            try:
                refused()
            except ar.UsageError as error:
                found.append(str(error))
    strategy.communicator.close()
    try:
        model.fit(*blobs(20), verbose=0)
    except ar.ClosedError as error:
        found.append(str(error))
    print(json.dumps(found))


def test_training_without_a_strategy_or_its_communicator_is_refused(told: Told) -> None:
    for rank, (none, compiling, loading, closed) in enumerate(told["no_strategy"]):
        assert compiling.startswith(f"compile on rank {rank}: unknown optimizer 'sdg'")
        assert loading.startswith(f"load_model on rank {rank}: ")
        assert none.startswith(f"fit on rank {rank} of 3")
        assert "ar.MultiWorkerMirroredStrategy().scope()" in none
        assert closed.startswith(f"fit on rank {rank}: the communicator of MultiWorkerMirrored")


def refused_on_one_rank() -> None:
    import json
    from collections.abc import Callable
    from functools import partial

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    bad = strategy.communicator.rank == 1
    x, y = blobs(24)
    wrong = np.where(np.arange(24) == 5, 7, y) if bad else y
    short = y[:-1] if bad else y

    class TwoRows(ar.nn.Model):
        def call(self, inputs: ar.Tensor) -> ar.Tensor:
            return ar.ops.ones((2, 3)) + ar.ops.sum(inputs)

    class Secretive(ar.nn.Dense):
        def get_config(self) -> dict[str, object]:
            assert not bad, "what it is made of is nobody's business"
            return super().get_config()

    with strategy.scope():
        model = classifier()
        two_rows, raw = TwoRows(), ar.nn.Sequential([ar.nn.Dense(3)])
        secretive = ar.nn.Sequential([Secretive(3)])
    if not bad:
        raw.compile("sgd", "mse")
    found: list[object] = []

    def tell(call: Callable[[], object]) -> None:
        try:
            found.append(call())
        except (ar.AllreduceError, AssertionError) as error:
            found.append([type(error).__name__, str(error)])

    def fit(labels: object, tests: object = y) -> object:
        tested = (x, tests)
        found = model.fit(
            x, labels, batch_size=8, verbose=0, validation_data=tested, data="sharded"
        )
        return found.history

    def evaluate(labels: object) -> object:
        return model.evaluate(x, labels, verbose=0, data="sharded")

    for labels in (short, wrong):
        tell(partial(fit, labels))
        tell(partial(evaluate, labels))
    tell(lambda: fit(y, wrong))
    tell(lambda: strategy.gather(ar.PerReplica((x[:2],)), axis=2 if bad else 0))
    tell(lambda: model.fit(x, y, epochs=-1 if bad else 1, verbose=0))
    tell(lambda: raw.evaluate(x, y, verbose=0))
    tell(lambda: secretive.predict(x, verbose=0))
    tell(lambda: two_rows.predict(x[:3], verbose=0))  # one of them is rank 1's
    tell(lambda: fit(y))
    tell(lambda: evaluate(y))
    # What ranks exchange by themselves is no call of theirs, alike as the arrays may be.
    tell(lambda: strategy.communicator.all_gather(np.array([7, 1])) if bad else fit(y))
    print(json.dumps(found))


def test_what_one_rank_refuses_is_raised_on_all_and_all_go_on() -> None:
    first, second = printed(run_ranks(refused_on_one_rank, 2))
    said = ["x and y need one row", "label 7 in row 5 of y"]
    said = [said[0], said[0], said[1], said[1], "label 7 in row 5 of validation y", "there is no"]
    said += ["epochs is an integer", "is not compiled", "nobody's business", "1 samples gave shape"]
    for words, here, there in zip(said, first, second, strict=False):
        assert words in there[1]
        assert here[0] == "MismatchError"
        own = there[1].partition(" on rank 1: ")[2] or there[1]  # another's error is as it was
        assert there[0] == "AssertionError" or own != there[1]
        assert here[1].endswith(f"on rank 0: rank 1 raised {there[0]}: {own}")
    trained = slice(len(said), len(said) + 2)
    assert first[trained] == second[trained]
    assert np.isfinite(first[len(said)]["val_loss"]).all()
    for kind, text in (first[-1], second[-1]):
        assert kind == "MismatchError"
        assert "exchange(a comparison of what ranks gave to fit)" in text
        assert "all_gather(int64[2])" in text


def save_everywhere() -> None:
    import json
    import os

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    strategy = ar.MultiWorkerMirroredStrategy()
    x, y = blobs(20)
    with strategy.scope():
        model = classifier()
    model.fit(x, y, verbose=0)
    path = f"{os.environ['SAVED']}/model"
    for _ in range(5):
        model.save(path)
    strategy.communicator.barrier()
    with strategy.scope():
        loaded = ar.nn.load_model(path)
    same = (loaded.predict(x, verbose=0) == model.predict(x, verbose=0)).all()
    again = model.fit(x, y, verbose=0).history == loaded.fit(x, y, verbose=0).history
    strategy.communicator.barrier()
    print(json.dumps([bool(same), again, os.listdir(os.environ["SAVED"])]))


def test_all_ranks_may_save_at_once_and_load(told: Told) -> None:
    assert told["save_everywhere"] == [[True, True, ["model"]]] * 3


def elsewhere() -> None:
    """Rank 1 calls what others do not, who are in a step or evaluate; then all start anew."""
    import json

    import numpy as np

    import allreduce as ar
    from tests.nn.common import blobs, classifier

    x, y = blobs(24)
    found = []
    for what in ("evaluate", "reduce", "gather", "predict"):
        strategy = ar.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = classifier()
        try:
            model.fit(x, y, verbose=0)  # which a rank may still be in when the first is told
            (batch,) = strategy.distribute_dataset([(x, y)])
            if strategy.communicator.rank != 1 and what == "predict":
                model.evaluate(x, y, verbose=0)
            elif strategy.communicator.rank != 1:
                strategy.run(model.train_step, args=batch)
            elif what == "predict":
                model.predict(x, verbose=0)
            elif what == "evaluate":
                model.evaluate(x, y, verbose=0)
            elif what == "reduce":
                strategy.reduce("sum", np.ones(2))
            else:
                strategy.gather(np.ones(2))
        except (ar.MismatchError, ar.PeerLostError) as error:
            found.append([type(error).__name__, str(error)])
        try:
            strategy.reduce("sum", 1.0)
        except ar.AllreduceError as error:
            found[-1].append(str(error))
        strategy.close()
        strategy.communicator.close()
    print(json.dumps(found))


def test_a_rank_that_calls_a_method_while_others_are_in_a_step_is_told(told: Told) -> None:
    for rank, errors in enumerate(told["elsewhere"]):
        calls = ("evaluate", "reduce", "gather", "predict")
        for what, (kind, message, after) in zip(calls, errors, strict=True):
            told_here = f"exchange(a comparison of what ranks gave to {what})"
            told_there = "was ended by MismatchError"  # quoted, and cut short
            assert (told_here if kind == "MismatchError" else told_there) in message
            assert kind == "MismatchError" or what != "predict"
            if rank == 1:  # others may have been in the last call before
                assert kind == "MismatchError"
                assert ("gave to evaluate" if what == "predict" else "all_reduce") in message
                assert "runs no steps any more, as MismatchError has ended" in after


ON_THREE_RANKS: tuple[tuple[abc.Callable[..., None], tuple[Any, ...]], ...] = (
    (train, ("",)),
    (replicas_in_threads_or_processes, (0,)),
    (differ, ()),
    (weights_of_one_rank, ()),
    (nan_on_one_rank, ()),
    (save_everywhere, ()),
    (no_strategy, ()),  # closes the communicator
    (elsewhere, ()),
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What three ranks of one job printed in each of these functions."""
    program = "\n".join(script_of(function, *given) for function, given in ON_THREE_RANKS)
    results = run_ranks(program, 3, env={"SAVED": str(tmp_path_factory.mktemp("saved"))})
    for result in results:
        assert result.returncode == 0, result.stderr
    lines = [[json.loads(line) for line in result.stdout.splitlines()] for result in results]
    return {
        function.__name__: [rank[number] for rank in lines]
        for number, (function, _) in enumerate(ON_THREE_RANKS)
    }
