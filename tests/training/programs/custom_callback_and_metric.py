"""A callback that stops at a goal, and a metric with a state of its own."""

from __future__ import annotations

from typing import Any

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    import allreduce as ar

    class Surprise(ar.nn.metrics.Metric):
        """The largest class's mean probability where it is wrong."""

        def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            best = ar.ops.cast(ar.ops.max(y_pred, axis=1), "float64")
            wrong = ar.ops.cast(ar.ops.argmax(y_pred, axis=1) != y_true, "float64")
            return ar.ops.stack([ar.ops.sum(best * wrong), ar.ops.sum(wrong)])

        def value(self, state: Any) -> float:
            return float(state[0] / state[1]) if state[1] else 0.0

    class StopAt(ar.callbacks.Callback):
        def __init__(self, goal: float) -> None:
            self.goal, self.epochs = goal, 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs = epoch + 1
            logs["goal"] = self.goal
            if logs["accuracy"] >= self.goal:
                self.model.stop_training = True

    x, y = classes(200, 6, 3, seed=4)
    with library.scope():
        model = ar.nn.Sequential([ar.nn.Input((6,)), ar.nn.Dense(3, "softmax")])
        start(model)
        model.compile(
            ar.optim.SGD(0.2), "sparse_categorical_crossentropy", ["accuracy", Surprise()]
        )
    losses, note = losses_of(library, 200, 30)
    stop = StopAt(0.9)
    history = model.fit(
        x, y, 30, epochs=20, shuffle=False, callbacks=[note, stop], verbose=0
    ).history
    assert len(history["goal"]) == stop.epochs < 20
    return result(losses, surprise=history["surprise"][-1], epochs=stop.epochs)
