"""Events and log records: listeners get what happened, records show their rank."""

from __future__ import annotations

import contextlib
import io
import logging
import textwrap
import time

import pytest

from allreduce import events


def test_spans_reach_listeners_until_they_leave() -> None:
    seen: list[events.Event] = []
    leave = events.subscribe(seen.append)
    try:
        with events.span("step", number=3):
            time.sleep(0.01)
        events.report("batch", 1.5, 0.25, {"peer": 1})
    finally:
        leave()
    events.report("batch", 2.5, 0.25, {})
    span, batch = seen
    assert (span.name, span.fields) == ("step", {"number": 3})
    assert span.seconds >= 0.01
    assert batch == ("batch", 1.5, 0.25, {"peer": 1})


def test_a_span_is_reported_when_its_block_fails() -> None:
    seen: list[events.Event] = []
    leave = events.subscribe(seen.append)
    try:
        with pytest.raises(KeyError), events.span("step"):
            raise KeyError("gone")
    finally:
        leave()
    assert [event.name for event in seen] == ["step"]


def test_a_listener_may_leave_while_it_is_called() -> None:
    seen: list[str] = []

    def once(event: events.Event) -> None:
        seen.append(event.name)
        leave()

    leave = events.subscribe(once)
    stay = events.subscribe(lambda event: seen.append("second " + event.name))
    try:
        events.report("a", 0.0, 1.0, {})
        events.report("b", 0.0, 1.0, {})
    finally:
        stay()
    assert seen == ["a", "second a", "second b"]


def stderr_of(script: str) -> str:
    """Run a script as if this process had not set up any logging yet, and leave none behind."""
    loggers = [logging.getLogger(), events.logger]
    before = [(each.handlers, each.level, each.propagate) for each in loggers]
    chosen = events._own_level, events._rank_filter.rank
    try:
        for each in loggers:
            each.handlers, each.propagate = [], True
            each.setLevel("WARNING" if each.parent is None else logging.NOTSET)
        events._own_level, events._rank_filter.rank = logging.NOTSET, None
        with contextlib.redirect_stderr(io.StringIO()) as said:
            exec(textwrap.dedent(script), {})
        return said.getvalue()
    finally:
        for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
        events._own_level, events._rank_filter.rank = chosen


LOG_BOTH = "events.logger.info('a detail'); events.logger.warning('careful')"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("0", ["[allreduce] rank 0: a detail", "[allreduce] rank 0: careful"]),
        ("3", ["[allreduce] rank 3: careful"]),
        ("3, 'INFO'", ["[allreduce] rank 3: a detail", "[allreduce] rank 3: careful"]),
        ("0, 'ERROR'", []),
        ("None", ["[allreduce] a detail", "[allreduce] careful"]),
    ],
)
def test_records_go_to_stderr_with_their_rank(arguments: str, expected: list[str]) -> None:
    script = f"from allreduce import events; events.configure_logging({arguments}); {LOG_BOTH}"
    assert stderr_of(script).splitlines() == expected


def test_records_are_not_doubled_by_the_applications_logging() -> None:
    lines = stderr_of(f"""
        import logging
        from allreduce import events
        logging.basicConfig(level=logging.DEBUG, format="app: %(message)s")
        events.configure_logging(0)
        events.configure_logging(0)
        {LOG_BOTH}
    """).splitlines()
    assert lines == ["[allreduce] rank 0: a detail", "[allreduce] rank 0: careful"]


def test_until_a_rank_is_known_the_applications_logging_is_enough() -> None:
    lines = stderr_of(f"""
        import logging
        from allreduce import events
        logging.basicConfig(format="app: %(message)s")
        events.configure_logging(None)
        {LOG_BOTH}
        events.configure_logging(1)
        {LOG_BOTH}
    """).splitlines()
    assert lines == ["app: a detail", "app: careful", "[allreduce] rank 1: careful"]


def test_a_handler_of_the_application_is_left_alone() -> None:
    lines = stderr_of(f"""
        import logging
        from allreduce import events
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mine %(rank)s: %(message)s"))
        logging.getLogger("allreduce").addHandler(handler)
        events.configure_logging(2)
        {LOG_BOTH}
    """).splitlines()
    assert lines == ["mine 2: careful"]


def test_a_level_of_the_application_is_left_alone() -> None:
    before = "import logging; logging.getLogger('allreduce').setLevel('ERROR')\n"
    configure = "from allreduce import events; events.configure_logging"
    assert stderr_of(f"{before}{configure}(0); {LOG_BOTH}") == ""
    after = "events.logger.setLevel('ERROR'); events.configure_logging(0)"
    assert stderr_of(f"{configure}(0); {after}; {LOG_BOTH}") == ""
    own = stderr_of(f"{configure}(3); events.configure_logging(0); {LOG_BOTH}")
    assert own.count("a detail") == 1
    assert "careful" in stderr_of(f"{before}{configure}(0, 'WARNING'); {LOG_BOTH}")


def test_before_a_rank_is_known_records_show_a_dash() -> None:
    record = logging.LogRecord("allreduce", logging.WARNING, __file__, 1, "early", None, None)
    assert events._RankFilter().filter(record)
    assert record.__dict__["rank"] == "-"
