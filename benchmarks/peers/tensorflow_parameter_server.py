"""Parameter servers of TensorFlow: one task of the cluster in TF_CONFIG; the chief prints a rate.

python tensorflow_parameter_server.py "[[784, 1024, 10], 128, 200]"    # sizes, batch, steps
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    """Serve, or train as the chief."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        spec, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        tf.distribute.Server(spec, job_name=job, task_index=task, protocol="grpc").join()
    sizes, batch, steps = json.loads(sys.argv[1])
    print("SAMPLES", train(resolver, sizes, batch, steps), flush=True)


def train(resolver: Any, sizes: list[int], batch: int, steps: int) -> float:
    """Return samples per second of the second of two turns, over all workers."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        layers = [tf.keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        layers = [tf.keras.Input((sizes[0],)), *layers, tf.keras.layers.Dense(sizes[-1])]
        model = tf.keras.Sequential(layers)
        optimizer = tf.keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(batch, sizes[0])).astype(np.float32))
    y = tf.constant(random.integers(0, sizes[-1], batch).astype(np.int32))

    def replica() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        return strategy.run(replica)

    seconds = 0.0
    for _ in range(2):  # the first one traces
        began = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()
        seconds = time.perf_counter() - began
    return batch * steps / seconds


if __name__ == "__main__":
    main()
