"""TensorFlow's MultiWorkerMirroredStrategy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from workloads import conv
from workloads.base import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Array, Workload


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, TensorFlow]:
    """Meet the other processes, and make this one's part."""
    assert workload.name == "conv", workload.name
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return rank, TensorFlow(workload.first_weights())


class TensorFlow:
    """The network of convolutions as one traced function; the update is its own fused kernel."""

    about = f"TensorFlow {tf.__version__}"

    def __init__(self, weights: dict[str, Array]) -> None:
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with self._strategy.scope():
            self._variables = {name: tf.Variable(each) for name, each in weights.items()}
            self._m = {name: tf.Variable(tf.zeros_like(each)) for name, each in weights.items()}
            self._v = {name: tf.Variable(tf.zeros_like(each)) for name, each in weights.items()}
        self._steps = 0
        self._run = tf.function(self._on_all)

    def step(self, *batch: Array) -> Any:
        """Do one step; returns the loss."""
        self._steps += 1
        powers = [tf.constant(beta**self._steps, tf.float32) for beta in (BETA_1, BETA_2)]
        x, labels = map(tf.constant, batch)
        return self._run(x, labels, *powers)

    def _on_all(self, *arguments: Any) -> Any:
        return self._strategy.run(self._on_one, args=arguments)

    def _on_one(self, x: Any, labels: Any, power_1: Any, power_2: Any) -> Any:
        variables = self._variables
        with tf.GradientTape() as tape:
            logits = self._logits(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        context = tf.distribute.get_replica_context()
        gradients = tape.gradient(loss, variables)
        mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, list(gradients.values()))
        for name, gradient in zip(variables, mean, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=variables[name].handle,
                m=self._m[name].handle,
                v=self._v[name].handle,
                beta1_power=power_1,
                beta2_power=power_2,
                lr=LEARNING_RATE,
                beta1=BETA_1,
                beta2=BETA_2,
                epsilon=EPSILON,
                grad=gradient,
            )
        return loss

    def _logits(self, x: Any) -> Any:
        variables = self._variables
        for place in range(len(conv.FILTERS)):
            x = tf.nn.conv2d(x, variables[f"conv{place}"], 1, "SAME")
            x = tf.nn.relu(x + variables[f"conv_bias{place}"])
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = tf.reshape(x, (tf.shape(x)[0], -1))
        x = tf.nn.relu(x @ variables["kernel0"] + variables["bias0"])
        return x @ variables["kernel1"] + variables["bias1"]

    def number(self, result: Any) -> float:
        (mine,) = self._strategy.experimental_local_results(result)
        return float(mine)

    def figures(self, seconds: float) -> dict[str, float]:
        return {}
