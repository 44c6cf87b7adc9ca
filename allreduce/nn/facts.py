"""What of a model has to be the same on all ranks, in words that are compared and shown."""

from __future__ import annotations

from typing import Any

from allreduce.errors import UsageError
from allreduce.nn import losses
from allreduce.nn.checks import inner_layers
from allreduce.nn.layer import Layer
from allreduce.nn.steps import Steps

# Of a layer's config: a name may count the layers of one process, and inner layers come themselves.
_LEFT_OUT = ("name", "layers")


def of_model(model: Layer, compiled: Steps | None, what: str) -> dict[str, str]:
    """List a model's layers, and how it is compiled.

    Args:
        model: Its layers count with the arguments that they were made with.
        compiled: None for a model that is not compiled.
        what: "predict" needs no loss, "evaluate" no optimizer.
    """
    layers = {"the model": model}
    for place, layer in enumerate(inner_layers(model).values()):
        layers[f"layer {place} ({type(layer).__name__})"] = layer
    facts = {"the list of layers": ", ".join(type(layer).__name__ for layer in layers.values())}
    for where, layer in layers.items():
        facts.update({f"{key} of {where}": repr(value) for key, value in _config(layer).items()})
    if compiled is not None and what != "predict":
        facts["the loss"] = _name(compiled.loss)
        facts["the list of metrics"] = f"[{', '.join(compiled.metrics)}]"
        if what == "fit":
            settings = compiled.optimizer.get_config().items()
            listed = ", ".join(f"{name}={value!r}" for name, value in settings)
            facts["the optimizer"] = f"{type(compiled.optimizer).__name__}({listed})"
    return facts


def _config(layer: Layer) -> dict[str, Any]:
    try:
        config = layer.get_config()
    except UsageError:  # it holds what has no name, as a function of one's own
        return {}
    return {key: value for key, value in config.items() if key not in _LEFT_OUT}


def _name(loss: Any) -> str:
    if isinstance(loss, losses.Loss):
        logits = "(from_logits=True)" if loss.from_logits else ""
        return f"{_name(loss.function)}{logits}"
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))
