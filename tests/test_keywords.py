"""Calls that do not fit a signature: the error says which argument was meant."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.cluster.store import LocalStore
from allreduce.keywords import explain

untyped: Any = ar
x = np.ones(3)


def _compiled() -> Any:
    model = ar.nn.Sequential([ar.nn.Input((3,)), ar.nn.Dense(2)])
    model.compile(loss="mse")
    return model


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: untyped.init(ranks=2), "init: unknown argument 'ranks': .*mean 'rank'"),
        (lambda: untyped.init(0, 2), "init takes rank=, size=, leader=, .* by name, not by pos"),
        (lambda: untyped.init().all_reduce(x, "sum"), "all_reduce takes op=, .* by name, not by"),
        (lambda: untyped.init().send(x, to=0), "send: unknown argument 'to': there are "),
        (lambda: untyped.init().broadcast(x, 0), "broadcast takes root=, .* by name, not by pos"),
        (lambda: untyped.MirroredStrategy(device="cpu:0"), "MirroredStrategy: .*mean 'devices'"),
        (lambda: untyped.MirroredStrategy().run(abs, arg=(x,)), "run: .* did you mean 'args'"),
        (lambda: untyped.MirroredStrategy().reduce("sum", x, axs=0), "reduce: .* mean 'axis'"),
        (lambda: untyped.Server(job="ps"), "Server: unknown argument 'job': .*mean 'job_name'"),
        (lambda: untyped.Session("grpc://h:1", timeot=1), "are is_chief, secret, .* 'timeout'"),
        (lambda: untyped.callbacks.EarlyStopping(monitr="loss"), "did you mean 'monitor'"),
        (lambda: untyped.callbacks.ModelCheckpoint("m", save_best=1), "mean 'save_best_only'"),
        (lambda: untyped.callbacks.TensorBoard(profile_batch=2), "takes no profile_batch=: with"),
        (lambda: untyped.function(autograph=False), "function takes no autograph=: leave it out"),
        (lambda: untyped.nn.MaxPool2D(1, 1, "same", 4), "MaxPool2D takes name=, .* not by pos"),
        (
            lambda: untyped.nn.Sequential(ar.nn.Dense(2), ar.nn.Dense(1)),
            "; only layers by position$",
        ),
        (lambda: untyped.optim.schedules.CosineDecay(1, 9, alfa=0.1), "mean 'alpha'"),
        (lambda: untyped.nn.load_model("m", compile=False), "takes no compile=: a model that was"),
        (lambda: _compiled().save("m", overwrite=True), "save takes no overwrite=: the file is"),
    ],
)
def test_an_argument_that_does_not_exist_is_answered_with_the_one_that_was_meant(
    call: Any, said: str
) -> None:
    with pytest.raises(ar.UsageError, match=said) as caught:
        call()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: ar.init().all_reduce(x, op="summ"),
        lambda: untyped.init().all_reduce(x, oq="sum"),
        lambda: untyped.init().empty(3, "flaot32"),
        lambda: ar.init().send(x, dest=7),
        lambda: ar.init().recv(x, source=7),
        lambda: untyped.init().split("one"),
        lambda: ar.init().group([7]),
        lambda: ar.init().plan("all_reduc", x),
        lambda: untyped.init().broadcast_object({1}),
        lambda: untyped.init().all_reduce_init([x], out=x),
        lambda: ar.nn.load_model("missing"),
        lambda: _compiled().fit(x[None], x[:2], verbose=0),
        lambda: _compiled().compile(loss="msee"),
        lambda: _compiled().compile(metrics=["accurracy"]),
        lambda: _compiled().train_on_batch(x[None], x[:2]),
        lambda: _compiled().load_weights("missing"),
        lambda: _compiled().compute_loss(y=x),
        lambda: _compiled().add(untyped),
        lambda: _compiled().fit(np.full((4, 3), np.nan), np.ones((4, 2)), verbose=0),
        lambda: _compiled()(np.ones((1, 4))),
        lambda: ar.nn.Dense(-1),
        lambda: untyped.nn.Dense(2, oops=1),
        lambda: ar.nn.losses.Huber(-1),
        lambda: ar.nn.metrics.AUC(curve="roc"),
        lambda: ar.optim.Adam(beta_1=2),
        lambda: untyped.ClusterCoordinator(ar.MirroredStrategy()),
        lambda: ar.optim.schedules.CosineDecay(0.1, 0),
        lambda: untyped.callbacks.EarlyStopping(mode="mean"),
        lambda: ar.ops.matmul(x, np.ones(2)),
        lambda: untyped.ops.ones(3) + np.ones(2),
        lambda: np.add(untyped.ops.ones(3), np.ones(2)),
        lambda: ar.Variable(x).assign(np.ones(2)),
        lambda: ar.Variable("x"),
        lambda: ar.PerReplica(untyped.errors),
        lambda: ar.nn.Dense(1)("x"),
        lambda: ar.device("toaster"),
        lambda: ar.scan(untyped.ops, x),
        lambda: ar.function(abs)(ar.PerReplica((x,))),
        lambda: ar.function(lambda a, b: a)(x),
        lambda: untyped.config.set_pipelining("no"),
    ],
)
def test_the_traceback_of_a_mistake_ends_at_the_call(call: Any) -> None:
    with pytest.raises((ar.UsageError, ar.NumericsError)) as caught:
        call()
    assert caught.traceback[-1].path == Path(__file__)


def test_the_traceback_of_a_failure_ends_at_the_call() -> None:
    with pytest.raises(ar.TimeoutError) as caught:
        explain()(LocalStore().get)("never", 0.0)
    assert caught.traceback[-1].path == Path(__file__)


def test_calls_that_python_refuses_end_at_the_call_too() -> None:
    for call in (untyped.nn.Dense, untyped.init().all_reduce):
        with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
            call()
        assert caught.traceback[-1].path == Path(__file__)


def test_a_mistake_in_ones_own_code_keeps_its_traceback() -> None:
    def step(x: Any) -> Any:
        return ar.ops.matmul(x, x)

    with pytest.raises(ar.UsageError) as caught:
        ar.function(step)(np.ones((2, 3)))
    assert "step" in [each.name for each in caught.traceback]
    assert caught.traceback[-1].name == "step"


class Noted(ar.nn.Dense):
    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(units, **options)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "note": 1}


def test_a_package_of_ones_own_may_have_the_name_of_one_of_pythons(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").touch()
    (tmp_path / "code" / "steps.py").write_text("def step(x):\n    return x @ x\n")
    program = "import numpy as np, allreduce as ar, code.steps; ar.function(code.steps.step)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}(np.ones((2, 3)))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "return x @ x" in done.stderr


def test_a_mistake_in_ones_own_constructor_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'note'"):
        Noted(2, note=1)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'self' and"):
        untyped.nn.Dense.__init__()
    ar.nn.Sequential([ar.nn.Input((3,)), Noted(2)]).save(tmp_path / "model")
    loaded = ar.nn.load_model(tmp_path / "model", {"Noted": Noted})
    assert loaded.get_config()["layers"][1]["config"]["note"] == 1


def test_public_functions_can_be_pickled() -> None:
    for each in (ar.ops.add, ar.ops.softmax, ar.config.set_buckets, ar.config.set_pipelining):
        assert pickle.loads(pickle.dumps(each)) is each


def test_a_call_without_an_argument_ends_at_the_call() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'") as caught:
        untyped.ops.matmul(x)
    assert caught.traceback[-1].path == Path(__file__)


def test_all_frames_are_shown_in_pythons_development_mode() -> None:
    program = "import allreduce as ar; ar.ops.matmul([1.0], [1.0, 2.0])"
    for mode, shown in (("-X", "dev"), ("-X", "utf8")):
        done = subprocess.run(
            [sys.executable, mode, shown, "-c", program], capture_output=True, text=True, timeout=90
        )
        assert "ShapeError" in done.stderr
        assert ("in matmul" in done.stderr) == (shown == "dev")


def test_a_type_error_inside_of_a_function_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="not subscriptable"):
        explain()(lambda: untyped.nn[0])()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: untyped.GradientTape(), r"ar has no 'GradientTape': ar\.gradients\(loss, vari"),
        (lambda: untyped.rank(), r"ar has no 'rank': comm = ar\.init\(\) gives comm\.rank$"),
        (
            lambda: _compiled().optimizer.apply_gradients([]),
            "RMSprop has no 'apply_gradients': app",
        ),
        (lambda: _compiled().optimizer.rate_of, "'RMSprop' object has no attribute 'rate_of'$"),
        (lambda: _compiled().layers[0].add_weight("k"), r"Dense has no 'add_weight': add_variable"),
        (lambda: _compiled().state_dict(), "Sequential has no 'state_dict': save_weights writes"),
        (lambda: untyped.ops.exp(x).backward(), r"'backward'; optimizer\.minimize\(loss, variab"),
    ],
)
def test_methods_of_other_libraries_name_what_does_the_same(call: Any, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        call()
