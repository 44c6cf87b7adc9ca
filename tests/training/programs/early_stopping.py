"""Stop when the validation no longer improves, with the best weights; lower the rate before."""

from __future__ import annotations

from typing import Any

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    x, y = classes(120, 12, 3, seed=5)
    with library.scope():
        model = library.Sequential(
            [
                library.layers.Input((12,)),
                library.layers.Dense(32, activation="relu"),
                library.layers.Dense(3, activation="softmax"),
            ]
        )
        start(model)
        model.compile(
            library.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    losses, note = losses_of(library, 90, 20)
    stop = library.callbacks.EarlyStopping(patience=4, restore_best_weights=True)
    slower = library.callbacks.ReduceLROnPlateau(patience=2, factor=0.5)
    history = model.fit(
        *(x, y, 20),
        epochs=40,
        shuffle=False,
        validation_split=0.25,
        callbacks=[note, slower, stop],
        verbose=0,
    ).history
    loss, _ = model.evaluate(x[90:], y[90:], verbose=0)
    assert abs(loss - min(history["val_loss"])) < 1e-4
    return result(losses, loss=loss, rate=history["learning_rate"][-1])
