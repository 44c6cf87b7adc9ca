"""What training did, for people to look at."""

from allreduce.observe.explanation import explain
from allreduce.observe.timeline import Timeline, timeline

__all__ = ["Timeline", "explain", "timeline"]
