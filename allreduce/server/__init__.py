"""Run one graph on the tasks of a cluster: a server per task, and sessions of clients."""
