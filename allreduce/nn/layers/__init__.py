"""Layers, one file each; `name`, `dtype` and `trainable` are those of `Layer`, their base."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # else type checkers would believe that every name is there

    def __getattr__(name: str) -> object:
        from allreduce import nn  # which imports the layers
        from allreduce.errors import did_you_mean

        hint = f"; use ar.nn.{name}" if name in nn.__all__ else did_you_mean(name, nn.__all__)
        # Without `name` a traceback adds a suggestion of its own.
        raise AttributeError(f"layers are in ar.nn, not in ar.nn.layers: {name!r}{hint}", name="")
