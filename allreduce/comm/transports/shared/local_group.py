"""What the members of one process share of a communicator."""

from __future__ import annotations

import threading
import weakref

from allreduce import _native
from allreduce.comm.calls.members import MemberInfo
from allreduce.comm.selection.choosing import Choices
from allreduce.comm.transports.shared.links import Links


class LocalGroup:
    """The mapped regions, and the sockets to the other processes."""

    def __init__(
        self,
        group: _native.Group,
        links: Links,
        members: tuple[MemberInfo, ...],
        local: int,
        choices: Choices,
    ) -> None:
        self.group = group
        self.choices = choices
        self.links = links
        self.members = members
        self.local_members = local
        self.first = sum(process.local_members for process in links.processes[: links.rank])
        self._open = local
        weakref.finalize(self, links.close).atexit = False
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Count a member out; with the last one the sockets go."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self.close_links()

    def close_links(self) -> None:
        self.group.drop_peers()
        self.links.close()
