"""AdamW, with a learning rate that rises and then falls as a cosine."""

from __future__ import annotations

from typing import Any

from tests.training.programs.library import classes, losses_of, result, start


def main(library: Any) -> dict[str, Any]:
    x, y = classes(250, 8, 4)
    with library.scope():
        model = library.Sequential(
            [
                library.layers.Input((8,)),
                library.layers.Dense(16, activation="relu"),
                library.layers.LayerNorm()
                if hasattr(library.layers, "LayerNorm")
                else library.layers.LayerNormalization(),
                library.layers.Dense(4, activation="softmax"),
            ]
        )
        start(model)
        schedule = library.schedules.CosineDecay(
            1e-3, decay_steps=20, warmup_target=0.02, warmup_steps=5
        )
        model.compile(
            library.optimizers.AdamW(schedule, weight_decay=0.01),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    losses, note = losses_of(library, 250, 40)
    model.fit(x, y, 40, epochs=4, shuffle=False, callbacks=[note], verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    return result(losses, loss=loss, accuracy=accuracy)
