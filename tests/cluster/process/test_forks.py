"""A forked child closes its connections to the group leader, and no others."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.processes import run

PROGRAM = """
import os, socket, stat, sys
from allreduce.cluster.process import forks

class Leader:
    address = sys.argv[1]

def listen(host, port, family=socket.AF_INET):
    server = socket.socket(family)
    server.bind((host, port))
    server.listen()
    return server

family = socket.AF_INET6 if sys.argv[2] == "mapped" else socket.AF_INET
leader = listen("127.0.0.1", 0)
port = leader.getsockname()[1]
database = listen("127.0.0.2", port)  # another host's, as far as its address tells
Leader.address = Leader.address.replace("PORT", str(port))
held = Leader()
forks.hold(held)
line = socket.socket(family)
line.connect(("::ffff:127.0.0.1" if family == socket.AF_INET6 else "127.0.0.1", port))
query = socket.create_connection(("127.0.0.2", port))
accepted = leader.accept()[0]
child = os.fork()
if child == 0:
    kept = [stat.S_ISSOCK(os.fstat(one.fileno()).st_mode) for one in (leader, line, accepted)]
    kept.append(stat.S_ISSOCK(os.fstat(query.fileno()).st_mode))
    print(kept, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("socket", ["plain", "mapped"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_on_the_leaders_port_of_another_address_stays(host: str, socket: str) -> None:
    result = run([sys.executable, "-c", PROGRAM, f"{host}:PORT", socket])
    assert (result.code, result.out) == (0, "[False, False, False, True]\n"), result


def test_a_leader_that_listens_everywhere_is_let_go_of() -> None:
    result = run([sys.executable, "-c", PROGRAM, "0.0.0.0:PORT", "plain"])
    assert result.out.startswith("[False, False, False, "), result
