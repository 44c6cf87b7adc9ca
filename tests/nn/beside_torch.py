"""Trains a network step by step beside the same one in PyTorch; whoever imports this needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from allreduce import nn, optim
from allreduce.graph import Variable, function, gradients
from allreduce.graph.core.tensor import Tensor

torch: Any = pytest.importorskip("torch", reason="needs torch: pip install torch")
F: Any = torch.nn.functional

Batch = tuple[np.ndarray, ...]
Weights = Mapping[str, Any]  # PyTorch's, by the paths of ours


def of_torch(array: Any) -> Any:
    """Copy an array of ours into a tensor of PyTorch's."""
    return torch.from_numpy(np.array(array))


def train_beside(
    variables: Mapping[str, Variable],
    ours: Callable[..., Tensor],
    theirs: Callable[..., Any],
    batches: Sequence[Batch],
    optimizer: optim.Optimizer | None = None,
    tolerance: float = 1e-9,
) -> Weights:
    """Compare each sample's loss, all gradients, and after each step all weights.

    Args:
        variables: What is trained, by path.
        ours: Takes a batch, and gives one loss per sample.
        theirs: Takes PyTorch's copies of the variables and a batch, likewise.
        batches: One for each step.
        optimizer: SGD by default.
        tolerance: Relative, and a hundredth of it absolute.

    Returns:
        PyTorch's weights after the last step.
    """
    optimizer = optimizer or optim.SGD(0.1)
    weights = {path: of_torch(v.numpy()).requires_grad_() for path, v in variables.items()}
    other = _optimizer(optimizer, list(weights.values()))

    @function
    def step(*batch: Any) -> Any:
        loss = ours(*batch)
        found = gradients(loss, list(variables.values()))
        optimizer.minimize(loss, list(variables.values()))
        return loss, found

    def equal(found: Any, wanted: Any, what: str) -> None:
        np.testing.assert_allclose(
            np.asarray(found), wanted.detach().numpy(), tolerance, tolerance / 100, err_msg=what
        )

    for number, batch in enumerate(batches):
        loss, found = step(*batch)
        wanted = theirs(weights, *map(of_torch, batch))
        other.zero_grad()
        wanted.mean().backward()
        equal(loss, wanted, f"loss of step {number}")
        for (path, weight), gradient in zip(weights.items(), found, strict=True):
            equal(gradient, weight.grad, f"gradient of {path} in step {number}")
        _prepare(other, optimizer, number + 1)
        other.step()
        for path, variable in variables.items():
            equal(variable, weights[path], f"{path} after step {number}")
    return weights


def _optimizer(ours: optim.Optimizer, weights: list[Any]) -> Any:
    rate = ours.learning_rate
    if isinstance(ours, optim.Adam):
        return torch.optim.Adam(weights, rate, (ours.beta_1, ours.beta_2))
    assert isinstance(ours, optim.SGD)
    return torch.optim.SGD(weights, rate, ours.momentum, nesterov=ours.nesterov)


def _prepare(theirs: Any, ours: optim.Optimizer, step: int) -> None:
    """Give PyTorch's Adam the epsilon that is Keras's "epsilon hat" in this step."""
    if isinstance(ours, optim.Adam):
        theirs.param_groups[0]["eps"] = ours.epsilon / (1 - ours.beta_2**step) ** 0.5


ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu": F.gelu,
    "linear": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "tanh": torch.tanh,
}


def apply_layer(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    """Compute in PyTorch what a layer of ours computes; `w` holds its variables by name."""
    return _LAYERS[type(layer)](layer, w, x, training)


def _activated(layer: Any, x: Any) -> Any:
    return ACTIVATIONS[nn.activations.name_of(layer.activation)](x)


def _dense(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    y = x @ w["kernel"]
    return _activated(layer, y + w["bias"] if layer.use_bias else y)


def _first(x: Any) -> Any:
    """Put channels first, as PyTorch has them."""
    return x.permute(0, 3, 1, 2)


def _last(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


def _padded(x: Any, size: Any, strides: Any, dilation: Any, padding: str, value: float) -> Any:
    """Pad images, channels first, so that "same" leaves one window per stride."""
    if padding == "valid":
        return x
    widths = []
    for n, k, s, d in zip(x.shape[2:], size, strides, dilation, strict=True):
        missing = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        widths.append((missing // 2, missing - missing // 2))
    (top, bottom), (left, right) = widths
    return F.pad(x, (left, right, top, bottom), value=value)


def _conv2d(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    how = layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding
    wide = _padded(_first(x), *how, 0.0)
    kernel = w["kernel"].permute(3, 2, 0, 1)
    y = F.conv2d(wide, kernel, w.get("bias"), layer.strides, 0, layer.dilation_rate, layer.groups)
    return _activated(layer, _last(y))


def _max_pool(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    how = layer.pool_size, layer.strides, (1, 1), layer.padding
    return _last(F.max_pool2d(_padded(_first(x), *how, -np.inf), layer.pool_size, layer.strides))


def _average_pool(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    how = layer.pool_size, layer.strides, (1, 1), layer.padding
    sums = F.avg_pool2d(_padded(_first(x), *how, 0.0), layer.pool_size, layer.strides)
    ones = _padded(torch.ones_like(_first(x)), *how, 0.0)
    return _last(sums / F.avg_pool2d(ones, layer.pool_size, layer.strides))


def _layer_norm(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    return F.layer_norm(x, x.shape[-1:], w.get("gamma"), w.get("beta"), layer.epsilon)


def _batch_norm(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    axes = tuple(range(x.ndim - 1))
    mean, variance = w["moving_mean"], w["moving_variance"]
    if training:
        mean, variance = x.mean(axes), x.var(axes, unbiased=False)
        kept = layer.momentum
        for moving, now in ((w["moving_mean"], mean), (w["moving_variance"], variance)):
            moving.copy_(kept * moving + (1 - kept) * now.detach())
    y = (x - mean) / torch.sqrt(variance + layer.epsilon)
    return y * w.get("gamma", 1.0) + w.get("beta", 0.0)


def _attention(layer: Any, w: Weights, x: Any, training: bool) -> Any:
    def heads(name: str) -> Any:
        y = x @ w[f"{name}/kernel"] + w[f"{name}/bias"]
        return y.reshape(*x.shape[:2], layer.num_heads, -1).transpose(1, 2)

    y = F.scaled_dot_product_attention(
        heads("query"), heads("key"), heads("value"), is_causal=layer.causal
    )
    y = y.transpose(1, 2).reshape(*x.shape[:2], -1)
    return y @ w["output/kernel"] + w["output/bias"]


_LAYERS: Mapping[type, Callable[..., Any]] = {
    nn.Activation: lambda layer, w, x, training: _activated(layer, x),
    nn.AveragePooling2D: _average_pool,
    nn.BatchNorm: _batch_norm,
    nn.Conv2D: _conv2d,
    nn.Dense: _dense,
    nn.Dropout: lambda layer, w, x, training: F.dropout(x, layer.rate, training),
    nn.Embedding: lambda layer, w, x, training: F.embedding(x, w["embeddings"]),
    nn.Flatten: lambda layer, w, x, training: x.reshape(len(x), -1),
    nn.GlobalAveragePooling2D: lambda layer, w, x, training: x.mean((1, 2)),
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2D: _max_pool,
    nn.MultiHeadAttention: _attention,
}
