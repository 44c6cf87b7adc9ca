"""Members of one process, laid out as if on several hosts."""

from __future__ import annotations

from functools import partial

import pytest

from allreduce.comm.transports.hierarchical import opener

_OPEN = opener.open_hierarchical


def lay_out(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    """Have communicators be hierarchical, of members on hosts that are named by letters."""
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "hierarchical")
    laid = partial(_OPEN, hosts=hosts.__getitem__)
    monkeypatch.setattr(opener, "open_hierarchical", laid)
