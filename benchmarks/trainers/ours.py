"""Our own side: the same networks, in one process or in several."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import allreduce as ar
import numpy as np
from allreduce.graph.replicate.owner import current_replicator
from workloads import adam, chain, conv, digits, transformer
from workloads.base import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Array, Workload

Step = Callable[..., ar.Tensor]
# Bytes of Python's own that a step of any size makes and drops; 2.8 KB in the smallest case.
_PYTHONS = 3 << 10
Model = tuple[ar.nn.Model, Callable[[ar.Tensor, ar.Tensor], ar.Tensor]]  # and the loss per sample


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, Any]:
    """Meet the other processes, if there are any, and make this one's part."""
    ar.set_seed(0)
    ar.config.threading.set_intra_op_parallelism_threads(1)
    if workload.name in ("input", "instructions"):
        from trainers import ours_alone

        return 0, ours_alone.SIDES[workload.name](workload)
    if len(ports) == 1 or name == "apart":
        return max(rank, 0), Ours(STEPS[workload.name](workload))
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        step = STEPS[workload.name](workload)
    backward = _filling() if workload.backward else None
    return strategy.communicator.rank, Together(step, strategy, backward)


class Ours:
    """A step in one process, called as any function."""

    about = f"allreduce {ar.__version__}"

    def __init__(self, step: Step) -> None:
        self._step = step
        self._batch: tuple[Array, ...] = ()  # of the latest step

    def step(self, *batch: Array) -> Any:
        """Do one step; returns the losses, one per sample."""
        self._batch = batch
        return self._run(*batch)

    def _run(self, *batch: Array) -> Any:
        return self._step(*batch)

    def number(self, result: Any) -> float:
        return float(np.mean(np.asarray(result)))

    def figures(self, seconds: float) -> dict[str, float]:
        """Return a step's memory, and the lower bound of its values.

        The memory that NumPy allocates during one more step is added to the plan's.
        """
        beyond = self._beyond()
        compiled = current_replicator().latest(self._step)
        assert compiled is not None, "a step has run"
        bound = compiled.executors[0].latest
        if bound is None or not bound.frame.memory.least:
            return {}
        frame = bound.frame
        return {"peak": frame.memory.nbytes + beyond, "bound": frame.memory.least}

    def _beyond(self) -> int:
        """Repeat a step; return the bytes that it needs besides planned memory."""
        self._run(*self._batch)  # unused memory has been freed then
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self._run(*self._batch)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return max(most - before - _PYTHONS, 0)


class Together(Ours):
    """A step of several processes, each with its own samples."""

    def __init__(
        self, step: Step, strategy: ar.MultiWorkerMirroredStrategy, backward: Step | None = None
    ) -> None:
        super().__init__(step)
        self._strategy = strategy
        self._backward = backward

    def backward(self, *batch: Array) -> Any:
        """Compute a step's gradients, in memory of this process."""
        assert self._backward is not None, "only of some cases"
        return self._backward(*batch)

    def _run(self, *batch: Array) -> Any:
        shares = tuple(ar.PerReplica((each,)) for each in batch)
        return self._strategy.run(self._step, args=shares)

    def number(self, result: Any) -> float:
        return super().number(result.values[0])

    def figures(self, seconds: float) -> dict[str, float]:
        with self._strategy.scope():
            return super().figures(seconds)


def optimizer() -> ar.optim.Adam:
    """Make the optimizer that all cases have."""
    return ar.optim.Adam(LEARNING_RATE, BETA_1, BETA_2, EPSILON)


def training(make: Callable[[Workload], Model]) -> Callable[[Workload], Step]:
    """Make the builder of a network's training step."""

    def built(workload: Workload) -> Step:
        model, loss = make(workload)
        rule = _clipping() if workload.name.endswith("-clipped") else optimizer()

        @ar.function
        def step(x: ar.Tensor, y: ar.Tensor) -> ar.Tensor:
            losses = loss(y, model(x, training=True))
            rule.minimize(losses, model.trainable_variables)
            return losses

        return step

    return built


def mlp(workload: Workload) -> Model:
    """Make dense layers with rectifiers."""
    first = list(workload.first_weights().values())
    sizes = [each.shape for each in first[::2]]
    layers = [ar.nn.Dense(m, activation="relu") for _, m in sizes[:-1]]
    last = ar.nn.Dense(sizes[-1][1], activation="softmax")
    model = ar.nn.Sequential([ar.nn.Input((sizes[0][0],)), *layers, last])
    model.set_weights(first)
    return model, ar.nn.losses.sparse_categorical_crossentropy


def _conv(workload: Workload) -> Model:
    blocks = [
        layer
        for filters in conv.FILTERS
        for layer in (
            ar.nn.Conv2D(filters, 3, padding="same", activation="relu"),
            ar.nn.MaxPool2D(),
        )
    ]
    dense = [
        ar.nn.Dense(conv.UNITS, activation="relu"),
        ar.nn.Dense(conv.CLASSES, activation="softmax"),
    ]
    images = ar.nn.Input((conv.SIDE, conv.SIDE, conv.CHANNELS))
    model = ar.nn.Sequential([images, *blocks, ar.nn.Flatten(), *dense])
    model.set_weights(list(workload.first_weights().values()))
    return model, ar.nn.losses.sparse_categorical_crossentropy


class _Block(ar.nn.Model):
    def __init__(self) -> None:
        super().__init__()
        heads = transformer.HEADS
        self.attention = ar.nn.MultiHeadAttention(heads, transformer.WIDTH // heads)
        self.norms = [ar.nn.LayerNorm(transformer.NORM_EPSILON) for _ in range(2)]
        self.wide = ar.nn.Dense(transformer.HIDDEN, activation="relu")
        self.narrow = ar.nn.Dense(transformer.WIDTH)

    def call(self, x: ar.Tensor) -> ar.Tensor:
        x = self.norms[0](x + self.attention(x))
        out = self.norms[1](x + self.narrow(self.wide(x)))
        assert isinstance(out, ar.Tensor)
        return out


def _transformer(workload: Workload) -> Model:
    model = _Block()
    model.build((None, transformer.TOKENS, transformer.WIDTH))
    first = workload.first_weights()
    attention, (before, behind) = model.attention, model.norms
    dense = [(getattr(attention, name), name, f"{name}_bias") for name in transformer.PROJECTIONS]
    dense += [(model.wide, "kernel0", "bias0"), (model.narrow, "kernel1", "bias1")]
    for layer, kernel, bias in dense:
        layer.kernel.assign(first[kernel])
        layer.bias.assign(first[bias])
    for place, norm in enumerate((before, behind)):
        norm.gamma.assign(first[f"gamma{place}"])
        norm.beta.assign(first[f"beta{place}"])
    return model, _squares


def _squares(y: ar.Tensor, out: ar.Tensor) -> ar.Tensor:
    return ar.ops.mean(ar.ops.square(out - y), axis=(1, 2))


def _digits(workload: Workload) -> Model:
    dropped = [
        layer
        for units in digits.UNITS
        for layer in (ar.nn.Dense(units, activation="relu"), ar.nn.Dropout(digits.DROPPED))
    ]
    last = ar.nn.Dense(digits.CLASSES, activation="softmax")
    model = ar.nn.Sequential([ar.nn.Input((digits.PIXELS,)), *dropped, last])
    return model, ar.nn.losses.sparse_categorical_crossentropy


def _clipping() -> ar.optim.AdamW:
    settings = adam.WEIGHT_DECAY, BETA_1, BETA_2, EPSILON
    return ar.optim.AdamW(LEARNING_RATE, *settings, clip_norm=adam.CLIP_NORM)


def _adam(workload: Workload) -> Step:
    variables = [ar.Variable(each, name=name) for name, each in workload.first_weights().items()]
    rule = optimizer() if workload.name == "adam" else _clipping()

    @ar.function
    def step(slope: ar.Tensor) -> ar.Tensor:
        value = ar.ops.sum(slope)
        firsts = sum((each[0] for each in variables[1:]), variables[0][0]) * value
        rule.apply([ar.ops.broadcast_to(value, (adam.SIZE,)) for _ in variables], variables)
        return firsts

    return step


def _filling() -> Step:
    """Make what a step of `_adam` does before its gradients are reduced."""
    gradients = [ar.Variable(np.zeros(adam.SIZE, np.float32)) for _ in range(adam.PARTS)]

    @ar.function
    def fill(slope: ar.Tensor) -> ar.Tensor:
        value = ar.ops.sum(slope)
        for each in gradients:
            each.assign(ar.ops.broadcast_to(value, (adam.SIZE,)))
        return value

    return fill


def _chain(workload: Workload) -> Step:
    return ar.function(lambda x: chain.apply(ar.ops, x))


STEPS: dict[str, Callable[[Workload], Step]] = {
    "mlp": training(mlp),
    "devices": training(mlp),
    "small": training(mlp),
    "mlp-clipped": training(mlp),
    "conv": training(_conv),
    "transformer": training(_transformer),
    "digits": training(_digits),
    "digits-each": training(_digits),
    "adam": _adam,
    "adamw-clipped": _adam,
    "chain": _chain,
}
