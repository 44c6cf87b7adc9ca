"""A step of one's own: the loss gets a penalty, and the gradients are clipped."""

from __future__ import annotations

from typing import Any

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    import allreduce as ar

    class Penalized(ar.nn.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            y_pred = self(x, training=True)
            penalty = 0.01 * ar.ops.sum(ar.ops.square(y_pred), axis=1)
            loss = self.compute_loss(y=y, y_pred=y_pred) + penalty
            self.optimizer.minimize(loss, self.trainable_variables)
            return {"loss": loss, "penalty": penalty, **self.compute_metrics(x, y, y_pred)}

    x, y = classes(200, 8, 3)
    with library.scope():
        model = Penalized([ar.nn.Input((8,)), ar.nn.Dense(12, "relu"), ar.nn.Dense(3)])
        start(model)
        logits = ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(ar.optim.Adam(0.02, clip_norm=0.5), logits, metrics=["accuracy"])
    losses, note = losses_of(library, 200, 30)
    history = model.fit(x, y, 30, epochs=4, shuffle=False, callbacks=[note], verbose=0).history
    return result(losses, **{name: values[-1] for name, values in history.items()})
