"""Names that processes of one host claim: one holder at a time, freed by its end."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time

from allreduce.cluster.host.claims import EndingSign, claim, is_claimed


def test_a_name_has_one_holder_and_is_free_when_its_process_is_killed() -> None:
    name = secrets.token_hex(8)
    program = (
        "import sys, time; from allreduce.cluster.host.claims import claim\n"
        f"held = claim({name!r}); print(held is not None, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert is_claimed(name)
        assert claim(name) is None
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    assert not is_claimed(name)


def test_ranks_wait_for_each_other_until_the_deadline() -> None:
    job = secrets.token_hex(8)
    first, second = EndingSign(job, 0, 3), EndingSign(job, 1, 3)
    assert second.others == [f"ending.{job}.0", f"ending.{job}.2"]
    assert is_claimed(f"ending.{job}.0")
    first.await_others(time.monotonic() + 0.1)  # the second is still ending
    assert not is_claimed(f"ending.{job}.0")
    second.await_others(time.monotonic() + 3600)  # returns: nobody else is
