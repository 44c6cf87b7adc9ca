"""One rank of a pool: runs the cases that it reads from its standard input, one per line."""

from __future__ import annotations

import json
import sys
import traceback

from allreduce.comm import init
from tests.comm.pool import case


def main() -> None:
    comm = init(timeout=60)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": case(name)(comm, *arguments)}
        except BaseException as error:
            answer = {"error": "".join(traceback.format_exception(error))}
            comm.abort(repr(error))
        print(json.dumps(answer), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
