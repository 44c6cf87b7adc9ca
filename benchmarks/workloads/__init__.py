"""The cases of benchmarks/training.py: one file each, or one for cases of one kind."""

from __future__ import annotations

from workloads import adam, chain, conv, digits, mlp, parts, transformer
from workloads.base import Workload

WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        *(mlp.LARGE, mlp.DEVICES, mlp.SMALL, conv.CASE, transformer.CASE, chain.CASE),
        *(
            mlp.CLIPPED,
            adam.CASE,
            adam.CLIPPED,
            parts.INPUT,
            parts.INSTRUCTIONS,
            digits.CASE,
            digits.EACH,
        ),
    )
}
