"""The replicator that new variables belong to: that of the innermost scope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.variable import set_owner_source

# Not of the thread: a step that runs eagerly has threads that go on where it was called.
_scope: ContextVar[Replicator | None] = ContextVar("scope", default=None)
_default: Replicator | None = None


def default_replicator() -> Replicator:
    """Return the single replica that owns everything outside of scopes."""
    global _default
    if _default is None:
        _default = Replicator()
    return _default


def current_replicator() -> Replicator:
    """Return the innermost scope's replicator, or the default one."""
    return _scope.get() or default_replicator()


@contextmanager
def scope_of(replicator: Replicator) -> Iterator[Replicator]:
    """Make `replicator` the owner of objects made in the block."""
    before = _scope.set(replicator)
    try:
        yield replicator
    finally:
        _scope.reset(before)


set_owner_source(current_replicator)
