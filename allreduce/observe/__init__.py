"""Inspect training: a timeline and an explanation."""

from allreduce.observe.explanation import explain
from allreduce.observe.timeline import Timeline, timeline

__all__ = ["Timeline", "explain", "timeline"]
