"""Log records of a process that has not joined any others, and may never do."""

from __future__ import annotations

import functools

from allreduce import events, settings


@functools.cache
def start_logging() -> None:
    """Let records be seen, at the level that ALLREDUCE_LOG_LEVEL says, unless joining did so.

    Raises:
        UsageError: An `ALLREDUCE_…` variable is not valid.
    """
    if events.current_rank() is None:
        events.configure_logging(None, settings.load().log_level)
