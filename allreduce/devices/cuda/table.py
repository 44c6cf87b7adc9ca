"""The operators and optimizers that have a GPU kernel, one row each.

A row names a module of `kernels/` and its function, which returns the kernel of an operator by
name. Text, so that looking a row up imports no CUDA package.
"""

from __future__ import annotations

_UNARY = (
    *("negative", "absolute", "sign", "floor", "exp", "log", "log1p", "expm1", "sin", "cos"),
    *("sqrt", "square", "relu", "tanh", "sigmoid", "erf", "logical_not"),
)
_BINARY = (
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"),
    *("relu_gradient", "logical_and", "logical_or"),
)
_COMPARE = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")

KERNELS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_UNARY, ("elementwise", "unary")),
    **dict.fromkeys(_BINARY, ("elementwise", "binary")),
    **dict.fromkeys(_COMPARE, ("elementwise", "compare")),
    "where": ("elementwise", "where"),
    "clip": ("elementwise", "clip"),
    "cast": ("copies", "cast"),
    "broadcast_to": ("copies", "copy"),
    "snapshot": ("copies", "copy"),
    "reshape_copy": ("copies", "reshape_copy"),
    "fill": ("copies", "fill"),
    "size": ("copies", "size"),
    "sum": ("reduce", "reduction"),
    "mean": ("reduce", "reduction"),
    "max": ("reduce", "reduction"),
    "min": ("reduce", "reduction"),
    "sum_to": ("reduce", "sum_to"),
    "argmax": ("reduce", "chosen"),
    "argmin": ("reduce", "chosen"),
    "matmul": ("products", "matmul"),
    "softmax": ("rows", "softmax"),
    "log_softmax": ("rows", "softmax"),
    "sparse_softmax_cross_entropy": ("rows", "sparse_loss"),
    "sparse_softmax_cross_entropy_gradient": ("rows", "sparse_loss"),
    "softmax_cross_entropy": ("rows", "loss"),
    "softmax_cross_entropy_gradient": ("rows", "loss"),
    "dropout": ("random", "dropout"),
}

# By the class whose `update` an optimizer has.
UPDATES: dict[str, str] = {
    "SGD": "sgd",
    "Adam": "adam",
    "Adagrad": "adagrad",
    "RMSprop": "rmsprop",
    "Lion": "lion",
    "LARS": "lars",
    "Lamb": "lamb",
}
