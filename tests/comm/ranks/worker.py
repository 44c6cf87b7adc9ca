"""One rank of a pool: runs the cases that it reads from its standard input, one per line.

With an argument it reads them from that Unix socket, to which it tells its rank first.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback

from allreduce.comm import init
from tests.comm.ranks.pool import case


def main() -> None:
    comm = init(timeout=60)
    source, target = sys.stdin, sys.stdout
    if sys.argv[1:]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(sys.argv[1])
            source, target = connection.makefile("r"), connection.makefile("w")
        print(comm.rank, file=target, flush=True)
    for line in source:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": case(name)(comm, *arguments)}
        except BaseException as error:
            answer = {"error": "".join(traceback.format_exception(error))}
            comm.abort(repr(error))
        print(json.dumps(answer), file=target, flush=True)
    comm.close()


if __name__ == "__main__":
    main()
