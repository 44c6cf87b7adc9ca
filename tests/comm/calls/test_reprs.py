"""The texts of communicators and works in debuggers and logs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from allreduce.comm import Communicator
from allreduce.errors import ClosedError, PeerLostError, UsageError
from tests.harness import run_threads


@pytest.mark.parametrize("transport", ["shared", "tcp", "hierarchical"])
def test_communicators_and_works_tell_their_state(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", transport)
    both = threading.Barrier(2)  # an abort may overtake a peer that is still leaving a collective

    def member(comm: Communicator) -> None:
        me = f"[{transport}] replica {comm.rank} (rank 0)"
        assert repr(comm) == f"<Communicator {comm.name!r}: {comm.rank} of 2, {transport}>"
        work = comm.all_reduce(np.ones(3), async_op=True)
        assert repr(work).endswith(f"Work {me}: all_reduce: started>")
        work.wait()
        assert repr(work).endswith(f"Work {me}: all_reduce: waited for>")
        several = comm.broadcast([np.ones(3), np.ones(2, "i4")], async_op=True)
        assert repr(several) == f"<ListWork {me}: broadcast: started>"
        several.wait()
        comm.send(np.ones(1), dest=comm.rank ^ 1, tag=5)
        received = comm.recv(np.ones(1), async_op=True)
        assert repr(received) == f"<Receive {me}: recv: started>"
        with pytest.raises(UsageError, match=r"recv: source and tag are known after wait\(\)"):
            received.source  # noqa: B018
        received.wait()
        end = f"waited for, of tag 5 from member {comm.rank ^ 1}>"
        assert repr(received) == f"<Receive {me}: recv: {end}"
        both.wait(timeout=60)
        if comm.rank:
            comm.abort("it was enough")
        else:
            with pytest.raises((PeerLostError, ClosedError), match="it was enough"):
                comm.barrier()
        assert repr(comm).endswith(f", {transport}, dead>")
        comm.close()
        assert repr(comm).endswith(f", {transport}, closed>")

    run_threads(member, 2)
