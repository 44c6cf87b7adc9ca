"""What training did, for people to look at."""

from allreduce.observe.timeline import Timeline, timeline

__all__ = ["Timeline", "timeline"]
