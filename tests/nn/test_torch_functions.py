"""Networks of operators, recurrent ones too, step by step beside PyTorch where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from allreduce import optim, scan
from allreduce.graph import Variable, ops
from tests.nn.beside_torch import F, torch, train_beside

ROWS = (4, 4, 3)  # of the batches
CLASSES = 7
Shape = tuple[int, ...]
Compute = Callable[..., Any]  # of weights in a list, and of the samples


@dataclass(frozen=True)
class Network:
    """The same outputs `(batch, …)` computed here and in PyTorch; the loss is their mean square.

    Attributes:
        weights: Their shapes.
        sample: The shape of a sample; of integers below CLASSES if `numbers`.
        ours: Computes with `ops`.
        theirs: With `torch`.
        numbers: Whether samples are integers.
        positive: Whether weights and samples are positive.
    """

    weights: tuple[Shape, ...]
    sample: Shape
    ours: Compute
    theirs: Compute
    numbers: bool = False
    positive: bool = False


# --- recurrent cells: w are the kernels and biases of PyTorch's own, transposed -------------------


def _gates(w: Any, x: Any, h: Any, parts: int) -> tuple[Any, Any]:
    return ops.split(x @ w[0] + w[1], parts, axis=1), ops.split(h @ w[2] + w[3], parts, axis=1)


def _rnn(w: Any, h: Any, x: Any) -> Any:
    return ops.tanh(x @ w[0] + w[1] + h @ w[2] + w[3])


def _gru(w: Any, h: Any, x: Any) -> Any:
    (r, z, n), (hr, hz, hn) = _gates(w, x, h, 3)
    kept = ops.sigmoid(z + hz)
    return (1 - kept) * ops.tanh(n + ops.sigmoid(r + hr) * hn) + kept * h


def _lstm(w: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = (a + b for a, b in zip(*_gates(w, x, h, 4), strict=True))
    c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
    return ops.sigmoid(o) * ops.tanh(c), c


def _recurrent(cell: Compute, reverse: bool = False) -> Compute:
    """Give all hidden states, `(batch, length, 4)`."""

    def ours(w: Any, x: Any) -> Any:
        start = ops.zeros((x.shape[0], 4), "float64")

        def step(carry: Any, x: Any) -> Any:
            after = cell(w, carry, x)
            return after, after[0] if isinstance(after, tuple) else after

        init = (start, start) if cell is _lstm else start
        _, hidden = scan(step, init, ops.transpose(x, (1, 0, 2)), reverse=reverse)
        return ops.transpose(hidden, (1, 0, 2))

    return ours


def _torch_recurrent(kind: str, reverse: bool = False) -> Compute:
    def theirs(w: Any, x: Any) -> Any:
        kernel, bias, recurrent, recurrent_bias = w
        layer = getattr(torch.nn, kind)(3, 4, batch_first=True, dtype=torch.float64)
        own = {
            "weight_ih_l0": kernel.T,
            "weight_hh_l0": recurrent.T,
            "bias_ih_l0": bias,
            "bias_hh_l0": recurrent_bias,
        }
        x = x.flip(1) if reverse else x
        hidden, _ = torch.func.functional_call(layer, own, (x,))
        return hidden.flip(1) if reverse else hidden

    return theirs


def _cell(gates: int) -> tuple[Shape, ...]:
    return (3, 4 * gates), (4 * gates,), (4, 4 * gates), (4 * gates,)


def _attended(x: Any, w: Any, **options: Any) -> Any:
    return ops.scaled_dot_product_attention(x @ w[0], x @ w[1], x @ w[2], **options)


def _torch_attended(x: Any, w: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(x @ w[0], x @ w[1], x @ w[2], **options)


MASK = np.array([[1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 0]], bool)
SQUARES = ((3, 3), (3, 3), (3, 3))

NETWORKS: Mapping[str, Network] = {
    "residual": Network(
        ((5, 5), (5,), (5, 5)),
        (5,),
        lambda w, x: x + ops.relu(x @ w[0] + w[1]) @ w[2],
        lambda w, x: x + torch.relu(x @ w[0] + w[1]) @ w[2],
    ),
    "concatenate": Network(
        ((5, 3), (5, 2), (5, 4)),
        (5,),
        lambda w, x: ops.concatenate([x @ w[0], ops.tanh(x @ w[1])], -1) @ w[2],
        lambda w, x: torch.cat([x @ w[0], torch.tanh(x @ w[1])], -1) @ w[2],
    ),
    "split": Network(
        ((5, 6),),
        (5,),
        lambda w, x: _product(*ops.split(x @ w[0], 2, axis=1)),
        lambda w, x: F.glu(x @ w[0], 1),
    ),
    "slices": Network(
        ((5, 7),),
        (5,),
        lambda w, x: _sliced(x @ w[0], lambda h: h[:, ::-1]),
        lambda w, x: _sliced(x @ w[0], lambda h: h.flip(1)),
    ),
    "take": Network(
        ((5, 6),),
        (5,),
        lambda w, x: ops.take(x @ w[0], np.array([4, 0, 0, -1]), axis=1),
        lambda w, x: (x @ w[0])[:, [4, 0, 0, 5]],
    ),
    "take along an axis": Network(
        ((5, 6),),
        (5,),
        lambda w, x: _chosen(x @ w[0], lambda h, i: ops.take_along_axis(h, i, 1), ops),
        lambda w, x: _chosen(x @ w[0], lambda h, i: h.gather(1, i), torch),
    ),
    "largest two": Network(
        ((5, 6),),
        (5,),
        lambda w, x: ops.top_k(x @ w[0], 2)[0],
        lambda w, x: torch.topk(x @ w[0], 2).values,
    ),
    "running sums": Network(
        ((5, 6),),
        (5,),
        lambda w, x: ops.cumsum(ops.tanh(x @ w[0]), 1) * ops.cumsum(x @ w[0], 1, reverse=True),
        lambda w, x: (
            torch.cumsum(torch.tanh(x @ w[0]), 1) * torch.cumsum((x @ w[0]).flip(1), 1).flip(1)
        ),
    ),
    "stack, pad, tile": Network(
        ((5, 3),),
        (5,),
        lambda w, x: ops.tile(
            ops.pad(ops.stack([x @ w[0], x[:, :3]], 1), ((0, 0), (1, 0), (0, 2))), (1, 2, 1)
        ),
        lambda w, x: F.pad(torch.stack([x @ w[0], x[:, :3]], 1), (0, 2, 1, 0)).tile(1, 2, 1),
    ),
    "where, clip, maximum": Network(
        ((5, 6), (6,)),
        (5,),
        lambda w, x: ops.where(
            x @ w[0] > w[1], ops.clip(x @ w[0], -0.5, 1.0), ops.maximum(w[1], 0.1)
        ),
        lambda w, x: torch.where(x @ w[0] > w[1], (x @ w[0]).clamp(-0.5, 1.0), w[1].clamp(min=0.1)),
    ),
    "powers and roots": Network(
        ((5, 6), (6,)),
        (5,),
        lambda w, x: ops.sqrt(x @ w[0]) ** w[1] + ops.log1p(x @ w[0]) / ops.exp(-w[1]),
        lambda w, x: torch.sqrt(x @ w[0]) ** w[1] + torch.log1p(x @ w[0]) / torch.exp(-w[1]),
        positive=True,
    ),
    "waves": Network(
        ((5, 6), (6,)),
        (5,),
        lambda w, x: ops.sin(x @ w[0]) * ops.cos(w[1]) - ops.expm1(w[1]) * ops.absolute(x @ w[0]),
        lambda w, x: torch.sin(x @ w[0]) * torch.cos(w[1]) - torch.expm1(w[1]) * (x @ w[0]).abs(),
    ),
    "batched products": Network(
        ((2, 3, 4), (4, 5)),
        (2, 5, 3),
        lambda w, x: ops.transpose(x @ w[0], (0, 1, 3, 2)) @ (x @ w[0] @ w[1]),
        lambda w, x: (x @ w[0]).transpose(2, 3) @ (x @ w[0] @ w[1]),
    ),
    "maxima": Network(
        ((3, 6),),
        (4, 3),
        lambda w, x: (
            ops.max(x @ w[0], axis=1) - ops.min(x @ w[0], axis=(1, 2), keepdims=False)[:, None]
        ),
        lambda w, x: (x @ w[0]).amax(1) - (x @ w[0]).amin((1, 2))[:, None],
    ),
    "standardized": Network(
        ((3, 6),),
        (4, 3),
        lambda w, x: (x @ w[0]) / ops.std(x @ w[0], axis=(1, 2), keepdims=True) + ops.var(w[0]),
        lambda w, x: (
            (x @ w[0]) / (x @ w[0]).std((1, 2), correction=0, keepdim=True) + w[0].var(correction=0)
        ),
    ),
    "log softmax": Network(
        ((3, 6),),
        (4, 3),
        lambda w, x: ops.log_softmax(x @ w[0], axis=1) * ops.softmax(x @ w[0], axis=-1),
        lambda w, x: F.log_softmax(x @ w[0], 1) * F.softmax(x @ w[0], -1),
    ),
    "one hot": Network(
        ((CLASSES, 4),),
        (5,),
        lambda w, x: ops.one_hot(x, CLASSES, "float64") @ w[0],
        lambda w, x: F.one_hot(x, CLASSES).double() @ w[0],
        numbers=True,
    ),
    "embeddings": Network(
        ((CLASSES, 4), (4, CLASSES)),
        (5,),
        lambda w, x: ops.embedding(w[0], x) @ w[1] + ops.transpose(w[0])[0],
        lambda w, x: F.embedding(x, w[0]) @ w[1] + w[0][:, 0],
        numbers=True,
    ),
    "approximate gelu": Network(
        ((5, 6),),
        (5,),
        lambda w, x: ops.gelu(x @ w[0], approximate=True),
        lambda w, x: F.gelu(x @ w[0], approximate="tanh"),
    ),
    "error function": Network(
        ((5, 6),), (5,), lambda w, x: ops.erf(x @ w[0]), lambda w, x: torch.erf(x @ w[0])
    ),
    "group norm": Network(
        ((3, 6), (6,), (6,)),
        (4, 3),
        lambda w, x: ops.group_norm(x @ w[0], 2, w[1], w[2]),
        lambda w, x: F.group_norm((x @ w[0]).transpose(1, 2), 2, w[1], w[2]).transpose(1, 2),
    ),
    "layer norm over two axes": Network(
        ((3, 6), (4, 6)),
        (4, 3),
        lambda w, x: ops.layer_norm(x @ w[0], w[1], axis=(1, 2)),
        lambda w, x: F.layer_norm(x @ w[0], (4, 6), w[1]),
    ),
    "a cut": Network(
        ((5, 6), (5, 6)),
        (5,),
        lambda w, x: ops.stop_gradient(x @ w[0]) * (x @ w[1]) + x @ w[0],
        lambda w, x: (x @ w[0]).detach() * (x @ w[1]) + x @ w[0],
    ),
    "masked attention": Network(
        SQUARES,
        (4, 3),
        lambda w, x: _attended(x, w, mask=MASK),
        lambda w, x: _torch_attended(x, w, attn_mask=torch.from_numpy(MASK)),
    ),
    "causal attention": Network(
        SQUARES,
        (4, 3),
        lambda w, x: _attended(x, w, causal=True),
        lambda w, x: _torch_attended(x, w, is_causal=True),
    ),
    "uneven padding": Network(
        ((2, 3, 2, 4),),
        (5, 4, 2),
        lambda w, x: ops.conv2d(x, w[0], (1, 2), ((0, 2), (1, 0))),
        lambda w, x: F.conv2d(
            F.pad(x.permute(0, 3, 1, 2), (1, 0, 0, 2)), w[0].permute(3, 2, 0, 1), stride=(1, 2)
        ).permute(0, 2, 3, 1),
    ),
    "recurrent": Network(_cell(1), (5, 3), _recurrent(_rnn), _torch_recurrent("RNN")),
    "recurrent, from the end": Network(
        _cell(1), (5, 3), _recurrent(_rnn, reverse=True), _torch_recurrent("RNN", reverse=True)
    ),
    "gru": Network(_cell(3), (5, 3), _recurrent(_gru), _torch_recurrent("GRU")),
    "lstm": Network(_cell(4), (5, 3), _recurrent(_lstm), _torch_recurrent("LSTM")),
}


def _product(a: Any, b: Any) -> Any:
    return a * ops.sigmoid(b)


def _sliced(h: Any, turned: Compute) -> Any:
    return h[:, 1:5:2] * h[:, -2:] + turned(h)[:, :2]


def _chosen(h: Any, along: Compute, library: Any) -> Any:
    numbers = library.argmax(h, 1)[:, None]
    return along(h, numbers) * h


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_trained_as_pytorch_trains_it(name: str) -> None:
    network, random = NETWORKS[name], np.random.default_rng([*name.encode()])

    def draw(shape: Shape) -> np.ndarray:
        return random.uniform(0.2, 1.5, shape) if network.positive else random.normal(size=shape)

    def samples(rows: int) -> np.ndarray:
        shape = (rows, *network.sample)
        return random.integers(0, CLASSES, shape) if network.numbers else draw(shape)

    def ours(x: Any) -> Any:
        y = network.ours(list(variables.values()), x)
        return ops.mean(ops.square(y), axis=tuple(range(1, y.ndim)))

    variables = {str(i): Variable(draw(s), name=f"w{i}") for i, s in enumerate(network.weights)}
    train_beside(
        variables,
        ours,
        lambda w, x: network.theirs(list(w.values()), x).square().flatten(1).mean(1),
        [(samples(rows),) for rows in ROWS],
        optim.SGD(0.01),
    )
