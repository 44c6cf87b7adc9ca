"""Parameter servers of TensorFlow: one task of the cluster in TF_CONFIG; the chief prints JSON.

python tensorflow_parameter_server.py train '{"sizes": [784, 1024, 10], "batch": 128, "steps": 200}'
python tensorflow_parameter_server.py table '{"rows": 1000, "shape": [64, 26], "batches": 4, …}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    """Serve, or measure as the chief."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        spec, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        tf.distribute.Server(spec, job_name=job, task_index=task, protocol="grpc").join()
    measure = train if sys.argv[1] == "train" else table
    found = measure(resolver, **json.loads(sys.argv[2]))
    print("FOUND", json.dumps(found), flush=True)


def train(resolver: Any, sizes: list[int], batch: int, steps: int) -> dict[str, float]:
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
        seconds = timed(coordinator, step, steps)
    return {"samples_per_second": batch * steps / seconds}


def table(
    resolver: Any,
    rows: int,
    shape: list[int],
    batches: int,
    steps: int,
    rate: float,
    accumulator: float,
) -> dict[str, float]:
    """Return rows looked up and updated per second, and the mean of the first batch's rows.

    A call runs one step for each batch, which TensorFlow may overlap. The numbers of a batch are
    made different once, for the lookup and for the update by one fused kernel on each server.
    """
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=shards)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    whole = (rows, 16)
    with strategy.scope():
        weights, accumulators = (
            tf.Variable(constant(value), shape=whole, dtype=tf.float32)
            for value in (0.0, accumulator)
        )
    random = np.random.default_rng(0)
    numbers = [random.integers(0, rows, shape).astype(np.int32) for _ in range(batches)]

    @tf.function  # type: ignore[untyped-decorator]
    def lookups() -> Any:
        return [tf.reduce_mean(look_up(weights, each)[1]) for each in numbers]

    @tf.function  # type: ignore[untyped-decorator]
    def updates() -> Any:
        for each in numbers:
            with tf.GradientTape() as tape:
                _, found = look_up(weights, each)
                loss = tf.reduce_mean(tf.reduce_sum(found, axis=(1, 2)))
            gradients = tape.gradient(loss, weights.variables)
            for place, own in enumerate(gradients):
                variable, its = weights.variables[place], accumulators.variables[place]
                with tf.device(variable.device):
                    tf.raw_ops.ResourceSparseApplyAdagradV2(
                        var=variable.handle,
                        accum=its.handle,
                        lr=rate,
                        epsilon=0.0,
                        grad=own.values,
                        indices=own.indices,
                    )

    moved = steps * numbers[0].size
    timed(coordinator, lookups, 1)
    looked = moved / timed(coordinator, lookups, steps // batches)
    timed(coordinator, updates, 1)
    updated = moved / timed(coordinator, updates, steps // batches)
    first = coordinator.schedule(lookups).fetch()[0]
    return {
        "lookups_per_second": looked,
        "updates_per_second": updated,
        "mean": float(first),
    }


def constant(value: float) -> Callable[..., Any]:
    """Return an initializer of shards, so that nobody makes the whole variable."""

    def made(partition_shape: Any, partition_offset: Any) -> Any:
        del partition_offset
        return tf.fill(partition_shape, value)

    return made


def look_up(weights: Any, numbers: Any) -> tuple[Any, Any]:
    """Return the rows of the different numbers, and those of all of them."""
    different, places = tf.unique(tf.reshape(numbers, (-1,)))
    rows = tf.nn.embedding_lookup(weights.variables, different)
    return rows, tf.reshape(tf.gather(rows, places), (*numbers.shape, rows.shape[-1]))


def timed(coordinator: Any, step: Any, times: int) -> float:
    """Return the seconds that so many calls take on the workers."""
    began = time.perf_counter()
    for _ in range(times):
        coordinator.schedule(step)
    coordinator.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
