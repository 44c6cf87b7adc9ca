"""The operators and optimizers that have a GPU kernel, one row each.

A row names a module of `kernels/` and its function, which returns the kernel of an operator by
name. Text, so that looking a row up imports no CUDA package.
"""

from __future__ import annotations

_UNARY = (
    *("negative", "absolute", "sign", "floor", "exp", "log", "log1p", "expm1", "sin", "cos"),
    *("sqrt", "square", "relu", "tanh", "sigmoid", "erf"),
    *("invert", "round_to_bfloat16"),
)
_BINARY = (
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"),
    *("relu_gradient", "floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor"),
)
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
_COMPARE = (
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
    *("isfinite", "isnan", "isinf"),
)
_POOLING = (
    *("max_pool2d", "max_pool2d_gradient", "max_pool2d_chosen"),
    *("average_pool2d", "average_pool2d_gradient"),
)

KERNELS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_UNARY, ("elementwise", "unary")),
    **dict.fromkeys(_BINARY, ("elementwise", "binary")),
    **dict.fromkeys(_COMPARE, ("elementwise", "compare")),
    **dict.fromkeys(_LOGICAL, ("elementwise", "logical")),
    **dict.fromkeys(_POOLING, ("images", "pooling")),
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
    "argmax": ("reduce", "along"),
    "argmin": ("reduce", "along"),
    "matmul": ("products", "matmul"),
    "softmax": ("rows", "softmax"),
    "log_softmax": ("rows", "softmax"),
    "sparse_softmax_cross_entropy": ("rows", "sparse_loss"),
    "sparse_softmax_cross_entropy_gradient": ("rows", "sparse_loss"),
    "softmax_cross_entropy": ("rows", "loss"),
    "softmax_cross_entropy_gradient": ("rows", "loss"),
    "cumsum": ("reduce", "along"),
    "take": ("gather", "take"),
    "scatter_add": ("gather", "scatter_add"),
    "take_along_axis": ("gather", "along_axis"),
    "add_along_axis": ("gather", "along_axis"),
    "one_hot": ("gather", "one_hot"),
    "top_k_indices": ("gather", "top_k_indices"),
    "order": ("gather", "order"),
    "concatenate": ("gather", "concatenate"),
    "pad": ("gather", "pad"),
    "unslice": ("gather", "unslice"),
    "own_rows": ("gather", "rows"),
    "among_rows": ("gather", "rows"),
    "conv2d": ("images", "conv2d"),
    "conv2d_images": ("images", "conv2d_images"),
    "conv2d_kernel": ("images", "conv2d_kernel"),
    "normalize": ("normalize", "normalize"),
    "normalize_gradient": ("normalize", "normalize"),
    "uniform": ("random", "deviates"),
    "normal": ("random", "deviates"),
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
