"""The operators as people call them: every family's public functions, gathered for `ar.ops`.

Importing this module fills the operator table and gives tensors their Python operators.
"""

from allreduce.errors import did_you_mean
from allreduce.graph.core.tensor import METHODS, OPERATORS
from allreduce.graph.ops import numpy_functions, state  # noqa: F401  (their rows)
from allreduce.graph.ops.array.conversion import stop_gradient
from allreduce.graph.ops.array.gather import embedding, take, take_along_axis, top_k
from allreduce.graph.ops.array.indexing import argmax, argmin, one_hot
from allreduce.graph.ops.array.joining import concatenate, pad, split, stack, tile
from allreduce.graph.ops.array.shape import (
    broadcast_to,
    expand_dims,
    flatten,
    full,
    ones,
    ones_like,
    reshape,
    size,
    squeeze,
    transpose,
    zeros,
    zeros_like,
)
from allreduce.graph.ops.array.slicing import getitem
from allreduce.graph.ops.collective import all_gather, all_reduce, replica_id
from allreduce.graph.ops.common import cast
from allreduce.graph.ops.math.comparison import (
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    equal,
    greater,
    greater_equal,
    invert,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
    where,
)
from allreduce.graph.ops.math.cumulative import cumsum
from allreduce.graph.ops.math.elementwise import (
    absolute,
    add,
    clip,
    cos,
    divide,
    exp,
    expm1,
    floor,
    floor_divide,
    log,
    log1p,
    maximum,
    minimum,
    multiply,
    negative,
    power,
    remainder,
    sign,
    sin,
    sqrt,
    square,
    subtract,
)
from allreduce.graph.ops.math.matmul import matmul
from allreduce.graph.ops.math.reduce import max, mean, min, std, sum, sum_to, var
from allreduce.graph.ops.nn.activation import erf, gelu, relu, sigmoid, tanh
from allreduce.graph.ops.nn.attention import scaled_dot_product_attention
from allreduce.graph.ops.nn.convolution import conv2d
from allreduce.graph.ops.nn.dropout import dropout
from allreduce.graph.ops.nn.losses import softmax_cross_entropy, sparse_softmax_cross_entropy
from allreduce.graph.ops.nn.normalization import group_norm, layer_norm, normalize
from allreduce.graph.ops.nn.pooling import (
    average_pool2d,
    global_average_pool2d,
    global_max_pool2d,
    max_pool2d,
)
from allreduce.graph.ops.nn.softmax import log_softmax, logits_of, softmax
from allreduce.graph.ops.random import normal, permutation, uniform

_PYTHON_OPERATORS = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "matmul"),
    *("negative", "absolute", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "getitem"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
)
OPERATORS.update({name: globals()[name] for name in _PYTHON_OPERATORS})

# By family, in the order of the imports.
__all__ = ["stop_gradient"]
__all__ += ["embedding", "take", "take_along_axis", "top_k"]
__all__ += ["argmax", "argmin", "one_hot"]
__all__ += ["concatenate", "pad", "split", "stack", "tile"]
__all__ += ["broadcast_to", "expand_dims", "flatten", "full", "ones", "ones_like", "reshape"]
__all__ += ["size", "squeeze", "transpose", "zeros", "zeros_like"]
__all__ += ["getitem"]
__all__ += ["all_gather", "all_reduce", "replica_id"]
__all__ += ["cast"]
__all__ += ["bitwise_and", "bitwise_or", "bitwise_xor", "equal", "greater", "greater_equal"]
__all__ += ["invert", "isfinite", "isinf", "isnan", "less", "less_equal", "logical_and"]
__all__ += ["logical_not", "logical_or", "logical_xor", "not_equal", "where"]
__all__ += ["cumsum"]
__all__ += ["absolute", "add", "clip", "cos", "divide", "exp", "expm1", "floor", "floor_divide"]
__all__ += ["log", "log1p", "maximum", "minimum", "multiply", "negative", "power", "remainder"]
__all__ += ["sign", "sin", "sqrt", "square", "subtract"]
__all__ += ["matmul"]
__all__ += ["max", "mean", "min", "std", "sum", "sum_to", "var"]
__all__ += ["erf", "gelu", "relu", "sigmoid", "tanh"]
__all__ += ["scaled_dot_product_attention"]
__all__ += ["conv2d"]
__all__ += ["dropout"]
__all__ += ["softmax_cross_entropy", "sparse_softmax_cross_entropy"]
__all__ += ["group_norm", "layer_norm", "normalize"]
__all__ += ["average_pool2d", "global_average_pool2d", "global_max_pool2d", "max_pool2d"]
__all__ += ["log_softmax", "logits_of", "softmax"]
__all__ += ["normal", "permutation", "uniform"]

METHODS.update({name: name for name in __all__}, astype="cast")


def __getattr__(name: str) -> object:
    text = f"ar.ops has no operator {name!r}{did_you_mean(name, __all__)}"
    raise AttributeError(text, name="")  # without it a traceback adds its own suggestion


def __dir__() -> list[str]:
    return sorted(__all__)
