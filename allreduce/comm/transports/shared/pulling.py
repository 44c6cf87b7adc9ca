"""Whether processes may copy straight out of each other's memory.

The kernel lets a process read another's memory (process_vm_readv) where it might trace it, too: of
the same user, and not forbidden by a security module (Yama's ptrace_scope), a container's filter of
system calls, or that process itself. Numbers of processes mean something in one namespace only. So
each process tries, and finds what the others have told it, or not.
"""

from __future__ import annotations

import errno
import os
import secrets

import numpy as np

from allreduce import _native, settings
from allreduce.comm.transports.shared.links import Links, Token


def new_token() -> Token:
    """Return what others have to find in this process's memory; it is there as long as this."""
    value = secrets.token_bytes(16)
    return Token(np.frombuffer(value, np.uint8).ctypes.data, value)


def refusal(links: Links) -> int:
    """Return why this process does not read the others' memory, as an errno value; 0 if it may."""
    if not settings.load().shared_pull:
        return errno.ECANCELED
    for process in links.processes:
        if process.rank == links.rank:
            continue
        address, value = process.token
        try:
            found = _native.read_process(process.pid, address, len(value))
        except OSError as error:
            return error.errno or errno.EPERM
        if found != value:  # that number is another process's here
            return errno.ESRCH
    return 0


def reason(refused: int) -> str:
    """Say of a process why it does not read the others' memory."""
    if refused == errno.ECANCELED:
        return "has that switched off, by ALLREDUCE_SHARED_PULL=off"
    return f"cannot read the others' memory: {os.strerror(refused)}"
