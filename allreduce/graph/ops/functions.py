"""The operators as people call them: every family's public functions, gathered for `ar.ops`.

Importing this module fills the operator table and gives tensors their Python operators.
"""

from allreduce.errors import did_you_mean
from allreduce.graph.core.tensor import METHODS, OPERATORS
from allreduce.graph.ops import numpy_functions, state  # noqa: F401  (their rows)
from allreduce.graph.ops.array.conversion import stop_gradient as stop_gradient
from allreduce.graph.ops.array.gather import embedding as embedding
from allreduce.graph.ops.array.gather import take as take
from allreduce.graph.ops.array.gather import take_along_axis as take_along_axis
from allreduce.graph.ops.array.gather import top_k as top_k
from allreduce.graph.ops.array.indexing import argmax as argmax
from allreduce.graph.ops.array.indexing import argmin as argmin
from allreduce.graph.ops.array.indexing import one_hot as one_hot
from allreduce.graph.ops.array.joining import concatenate as concatenate
from allreduce.graph.ops.array.joining import pad as pad
from allreduce.graph.ops.array.joining import split as split
from allreduce.graph.ops.array.joining import stack as stack
from allreduce.graph.ops.array.joining import tile as tile
from allreduce.graph.ops.array.shape import broadcast_to as broadcast_to
from allreduce.graph.ops.array.shape import expand_dims as expand_dims
from allreduce.graph.ops.array.shape import flatten as flatten
from allreduce.graph.ops.array.shape import full as full
from allreduce.graph.ops.array.shape import ones as ones
from allreduce.graph.ops.array.shape import ones_like as ones_like
from allreduce.graph.ops.array.shape import reshape as reshape
from allreduce.graph.ops.array.shape import size as size
from allreduce.graph.ops.array.shape import squeeze as squeeze
from allreduce.graph.ops.array.shape import transpose as transpose
from allreduce.graph.ops.array.shape import zeros as zeros
from allreduce.graph.ops.array.shape import zeros_like as zeros_like
from allreduce.graph.ops.array.slicing import getitem as getitem
from allreduce.graph.ops.collective import all_gather as all_gather
from allreduce.graph.ops.collective import all_reduce as all_reduce
from allreduce.graph.ops.collective import replica_id as replica_id
from allreduce.graph.ops.common import cast as cast
from allreduce.graph.ops.math.comparison import bitwise_and as bitwise_and
from allreduce.graph.ops.math.comparison import bitwise_or as bitwise_or
from allreduce.graph.ops.math.comparison import bitwise_xor as bitwise_xor
from allreduce.graph.ops.math.comparison import equal as equal
from allreduce.graph.ops.math.comparison import greater as greater
from allreduce.graph.ops.math.comparison import greater_equal as greater_equal
from allreduce.graph.ops.math.comparison import invert as invert
from allreduce.graph.ops.math.comparison import isfinite as isfinite
from allreduce.graph.ops.math.comparison import isinf as isinf
from allreduce.graph.ops.math.comparison import isnan as isnan
from allreduce.graph.ops.math.comparison import less as less
from allreduce.graph.ops.math.comparison import less_equal as less_equal
from allreduce.graph.ops.math.comparison import logical_and as logical_and
from allreduce.graph.ops.math.comparison import logical_not as logical_not
from allreduce.graph.ops.math.comparison import logical_or as logical_or
from allreduce.graph.ops.math.comparison import logical_xor as logical_xor
from allreduce.graph.ops.math.comparison import not_equal as not_equal
from allreduce.graph.ops.math.comparison import where as where
from allreduce.graph.ops.math.cumulative import cumsum as cumsum
from allreduce.graph.ops.math.elementwise import absolute as absolute
from allreduce.graph.ops.math.elementwise import add as add
from allreduce.graph.ops.math.elementwise import clip as clip
from allreduce.graph.ops.math.elementwise import cos as cos
from allreduce.graph.ops.math.elementwise import divide as divide
from allreduce.graph.ops.math.elementwise import exp as exp
from allreduce.graph.ops.math.elementwise import expm1 as expm1
from allreduce.graph.ops.math.elementwise import floor as floor
from allreduce.graph.ops.math.elementwise import floor_divide as floor_divide
from allreduce.graph.ops.math.elementwise import log as log
from allreduce.graph.ops.math.elementwise import log1p as log1p
from allreduce.graph.ops.math.elementwise import maximum as maximum
from allreduce.graph.ops.math.elementwise import minimum as minimum
from allreduce.graph.ops.math.elementwise import multiply as multiply
from allreduce.graph.ops.math.elementwise import negative as negative
from allreduce.graph.ops.math.elementwise import power as power
from allreduce.graph.ops.math.elementwise import remainder as remainder
from allreduce.graph.ops.math.elementwise import sign as sign
from allreduce.graph.ops.math.elementwise import sin as sin
from allreduce.graph.ops.math.elementwise import sqrt as sqrt
from allreduce.graph.ops.math.elementwise import square as square
from allreduce.graph.ops.math.elementwise import subtract as subtract
from allreduce.graph.ops.math.matmul import matmul as matmul
from allreduce.graph.ops.math.reduce import max as max
from allreduce.graph.ops.math.reduce import mean as mean
from allreduce.graph.ops.math.reduce import min as min
from allreduce.graph.ops.math.reduce import std as std
from allreduce.graph.ops.math.reduce import sum as sum
from allreduce.graph.ops.math.reduce import sum_to as sum_to
from allreduce.graph.ops.math.reduce import var as var
from allreduce.graph.ops.nn.activation import erf as erf
from allreduce.graph.ops.nn.activation import gelu as gelu
from allreduce.graph.ops.nn.activation import relu as relu
from allreduce.graph.ops.nn.activation import sigmoid as sigmoid
from allreduce.graph.ops.nn.activation import tanh as tanh
from allreduce.graph.ops.nn.attention import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from allreduce.graph.ops.nn.convolution import conv2d as conv2d
from allreduce.graph.ops.nn.dropout import dropout as dropout
from allreduce.graph.ops.nn.losses import softmax_cross_entropy as softmax_cross_entropy
from allreduce.graph.ops.nn.losses import (
    sparse_softmax_cross_entropy as sparse_softmax_cross_entropy,
)
from allreduce.graph.ops.nn.normalization import group_norm as group_norm
from allreduce.graph.ops.nn.normalization import layer_norm as layer_norm
from allreduce.graph.ops.nn.normalization import normalize as normalize
from allreduce.graph.ops.nn.pooling import average_pool2d as average_pool2d
from allreduce.graph.ops.nn.pooling import global_average_pool2d as global_average_pool2d
from allreduce.graph.ops.nn.pooling import global_max_pool2d as global_max_pool2d
from allreduce.graph.ops.nn.pooling import max_pool2d as max_pool2d
from allreduce.graph.ops.nn.softmax import log_softmax as log_softmax
from allreduce.graph.ops.nn.softmax import logits_of as logits_of
from allreduce.graph.ops.nn.softmax import softmax as softmax
from allreduce.graph.ops.random import normal as normal
from allreduce.graph.ops.random import permutation as permutation
from allreduce.graph.ops.random import uniform as uniform
from allreduce.keywords import explain_all

_PYTHON_OPERATORS = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "matmul"),
    *("negative", "absolute", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "getitem"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
)
OPERATORS.update({name: globals()[name] for name in _PYTHON_OPERATORS})

# Every operator imported here is public.
__all__ = sorted(
    name
    for name, each in globals().items()
    if getattr(each, "__module__", "").startswith("allreduce.graph.ops.")
)

# Where a program calls them; calls among operators need no shorter tracebacks.
explain_all(globals(), __all__)

METHODS.update({name: name for name in __all__}, astype="cast")


def __getattr__(name: str) -> object:
    text = f"ar.ops has no operator {name!r}{did_you_mean(name, __all__)}"
    raise AttributeError(text, name="")  # without it a traceback adds its own suggestion


def __dir__() -> list[str]:
    return sorted(__all__)
