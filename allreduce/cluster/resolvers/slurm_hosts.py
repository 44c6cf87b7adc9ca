"""Where a Slurm step's tasks on several hosts meet, when no MPI tells them: all can work it out.

Task 0 is on the step's first host, whose name Slurm tells to all. The port cannot be told, so it
is one of a few that follow from the step; whatever else may listen there fails the handshake.
"""

from __future__ import annotations

import hashlib
import itertools
import re

from allreduce.cluster.host.interfaces import towards_any
from allreduce.errors import JoinError

PORTS = 4
_LOWEST, _HIGHEST = 20000, 32767  # Linux takes ports for outgoing connections from 32768 on


def expand(nodelist: str) -> list[str]:
    """List the hosts that Slurm writes as `gpu[08-10,12],login`."""
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part)  # texts and, between them, what was in brackets
        choices = [[text] if i % 2 == 0 else _numbers(text) for i, text in enumerate(pieces)]
        found += ["".join(words) for words in itertools.product(*choices)]
    return found


def _numbers(listed: str) -> list[str]:
    """Expand `08-10,12`; leading zeros stay."""
    found = []
    for one in listed.split(","):
        low, _, high = one.partition("-")
        last = high or low
        found += [str(number).zfill(len(low)) for number in range(int(low), int(last) + 1)]
    return found


def ports(step: str, generation: int) -> list[int]:
    """Return the ports where the leader of a step may listen, in the order of trying."""
    drawn = (hashlib.sha256(f"{step}/{generation}/{i}".encode()).digest() for i in range(PORTS))
    return [_LOWEST + int.from_bytes(one[:4], "big") % (_HIGHEST - _LOWEST) for one in drawn]


def listening_address(nodelist: str) -> str:
    """Choose where task 0 listens: by which the step's other hosts are reached.

    Raises:
        JoinError: There is no such address.
    """
    others = expand(nodelist)[1:]
    local = towards_any(others)
    if local is None:
        raise JoinError(
            f"[cluster] rank 0: no address by which {', '.join(others[:3])} could be reached; "
            "check that the step's hosts know each other's names"
        )
    return local
