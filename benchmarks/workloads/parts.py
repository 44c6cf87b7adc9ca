"""Figures without a peer: how well input is hidden, and the cost of an instruction."""

from __future__ import annotations

from dataclasses import replace

from workloads.mlp import LARGE, SMALL

INPUT = replace(LARGE, name="input", title="input as dear as the step", sides=(("ours", 1),))
INSTRUCTIONS = replace(
    SMALL, name="instructions", title="instructions on one number each", sides=(("ours", 1),)
)
