"""PyTorch: eager in one process, DistributedDataParallel over gloo in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from workloads import adam, transformer
from workloads.base import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Array, Workload

Weights = dict[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]


def build(name: str, workload: Workload, rank: int, ports: Sequence[int]) -> tuple[int, PyTorch]:
    """Meet the other processes, and make this one's part."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if len(ports) > 1:
        meeting = f"tcp://127.0.0.1:{ports[0]}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(ports))
    weights = {key: torch.from_numpy(each) for key, each in workload.first_weights().items()}
    model, loss = _MODELS[workload.name](weights)
    settings = {"several": len(ports) > 1, "fused": name == "pytorch-fused"}
    return rank, PyTorch(model, loss, clips=workload.name.endswith("-clipped"), **settings)


class PyTorch:
    """A model, its loss, and torch.optim.Adam, or AdamW with clipping by the norm."""

    about = f"PyTorch {torch.__version__}"

    def __init__(
        self, model: nn.Module, loss: Loss, *, several: bool, fused: bool, clips: bool = False
    ) -> None:
        # Gradients that are views of the buckets save a copy.
        self._model = (
            nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            if several
            else model
        )
        self._loss = loss
        self._clips = clips
        self._buckets: dict[torch.Tensor, torch.Tensor] = {}
        settings = (model.parameters(), LEARNING_RATE, (BETA_1, BETA_2), EPSILON)
        if clips:
            self._adam = torch.optim.AdamW(*settings, adam.WEIGHT_DECAY, fused=fused)
        else:
            self._adam = torch.optim.Adam(*settings, fused=fused)

    def step(self, *batch: Array) -> torch.Tensor:
        """Do one step; returns the loss."""
        loss = self._backward(*batch)
        if self._clips:
            nn.utils.clip_grad_norm_(self._model.parameters(), adam.CLIP_NORM)
        self._adam.step()
        return loss

    def _backward(self, *batch: Array) -> torch.Tensor:
        x, *rest = map(torch.from_numpy, batch)
        loss = self._loss(self._model(x), *rest)
        self._adam.zero_grad()
        loss.backward()
        return loss

    def backward(self, *batch: Array) -> torch.Tensor:
        """Compute gradients; copy each to a bucket and free it, as DDP does before it reduces."""
        assert isinstance(self._model, nn.parallel.DistributedDataParallel), "of several processes"
        parameters = list(self._model.parameters())
        self._buckets = self._buckets or {each: torch.empty_like(each) for each in parameters}
        hooks = [each.register_post_accumulate_grad_hook(self._copy) for each in parameters]
        with self._model.no_sync():
            loss = self._backward(*batch)
        for each in hooks:
            each.remove()
        return loss

    def _copy(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "called when it is complete"
        self._buckets[parameter].copy_(parameter.grad)
        parameter.grad = None

    def number(self, result: torch.Tensor) -> float:
        return float(result)

    def figures(self, seconds: float) -> dict[str, float]:
        return {}


def _dense(weights: Weights, place: int) -> nn.Linear:
    """Make a dense layer with the weights `kernel<place>` and `bias<place>`."""
    return _linear(weights[f"kernel{place}"], weights[f"bias{place}"])


def _linear(kernel: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(*kernel.shape)
    _set(layer, kernel.T, bias)
    return layer


def _set(layer: Any, weight: torch.Tensor, bias: torch.Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)


def _mlp(weights: Weights) -> tuple[nn.Module, Loss]:
    layers: list[nn.Module] = []
    for place in range(len(weights) // 2):
        layers += [_dense(weights, place), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), functional.cross_entropy


class _Conv(nn.Module):
    """Images come channels-last, which is also how oneDNN is quickest on them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        for place in range(2):
            kernel = weights[f"conv{place}"].permute(3, 2, 0, 1)
            layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, padding="same")
            _set(layer, kernel, weights[f"conv_bias{place}"])
            self.convolutions.append(layer)
        self.to(memory_format=torch.channels_last)
        self.first = _dense(weights, 0)
        self.last = _dense(weights, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.permute(0, 3, 1, 2)  # a view that lies channels-last
        for layer in self.convolutions:
            x = functional.max_pool2d(functional.relu(layer(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # rows, columns, channels: as they lie, so no copy
        x = functional.relu(self.first(x))
        last: torch.Tensor = self.last(x)
        return last


def _conv(weights: Weights) -> tuple[nn.Module, Loss]:
    return _Conv(weights), functional.cross_entropy


def _transformer(weights: Weights) -> tuple[nn.Module, Loss]:
    layer = nn.TransformerEncoderLayer(
        transformer.WIDTH,
        transformer.HEADS,
        transformer.HIDDEN,
        dropout=0.0,
        layer_norm_eps=transformer.NORM_EPSILON,
        batch_first=True,
    )
    attention, names = layer.self_attn, ("query", "key", "value")
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([weights[name].T for name in names]))
        attention.in_proj_bias.copy_(torch.cat([weights[f"{name}_bias"] for name in names]))
    _set(attention.out_proj, weights["output"].T, weights["output_bias"])
    for place, (dense, norm) in enumerate(
        ((layer.linear1, layer.norm1), (layer.linear2, layer.norm2))
    ):
        _set(dense, weights[f"kernel{place}"].T, weights[f"bias{place}"])
        _set(norm, weights[f"gamma{place}"], weights[f"beta{place}"])
    return layer, functional.mse_loss


class _Filled(torch.autograd.Function):
    """Has a number as the gradient of every element."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        context.slope, context.shape = slope, parameter.shape
        return parameter[:1] * slope

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.slope.expand(context.shape), None


class _Parts(nn.Module):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.parts = nn.ParameterList(weights.values())

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return torch.cat([_Filled.apply(part, slope) for part in self.parts])


def _adam(weights: Weights) -> tuple[nn.Module, Loss]:
    return _Parts(weights), torch.sum


_MODELS: dict[str, Callable[[Weights], tuple[nn.Module, Loss]]] = {
    "mlp": _mlp,
    "small": _mlp,
    "mlp-clipped": _mlp,
    "conv": _conv,
    "transformer": _transformer,
    "adam": _adam,
    "adamw-clipped": _adam,
}
