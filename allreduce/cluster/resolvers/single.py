"""A world of one: the last resolver, for a process that no other one claims."""

from __future__ import annotations

import os
import secrets
import socket

from allreduce.cluster.host.launchers import check_single
from allreduce.cluster.host.machine import identity
from allreduce.cluster.resolvers.resolver import Request, Resolver, explain
from allreduce.cluster.store import LocalStore
from allreduce.cluster.world import Member, World


class Single(Resolver):
    """Claims every process."""

    name = "single"

    def claim(self, request: Request) -> str | None:  # noqa: ARG002 - it claims all
        return "no argument, ALLREDUCE_ variable, MPI launcher or Slurm step says otherwise"

    def join(self, request: Request, ignored: str) -> World:
        check_single(request.environ)
        evidence = self.claim(request) or ""
        return world_of_one(request, self.name, evidence, ignored)


def world_of_one(request: Request, name: str, evidence: str, ignored: str) -> World:
    """Build a world of one rank, without connections, for any resolver."""
    return World(
        generation=request.generation,
        rank=0,
        size=1,
        members=(Member(0, socket.gethostname(), os.getpid(), identity()),),
        source=name,
        why=explain(1, name, evidence, ignored),
        job=secrets.token_hex(16),
        secret=request.secret or secrets.token_bytes(32),
        store=LocalStore(),
    )
