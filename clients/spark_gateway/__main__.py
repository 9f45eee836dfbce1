"""The command `sparkd-gateway`; also python -m spark_gateway.

    sparkd-gateway [--host 127.0.0.1] [--port 8080] [--unix PATH] [--keys FILE] ...     serve
    sparkd-gateway key NAME                                                             make an API key

`sparkd serve` runs it when `gateway.enabled` is set.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from spark_gateway.arguments import parser
from spark_gateway.keys import KeysError, make

#: What serving takes beside a plain install: the extra `gateway`.
LIBRARIES = ("prometheus-client", "pydantic", "starlette", "uvicorn")


def run(argv: Sequence[str] | None = None) -> int:
    """Make a key, or serve until SIGTERM or SIGINT; one line on standard error and exit code 1 if that cannot be."""
    given = parser().parse_args(argv)
    if given.command == "key":
        return _make_key(given.name)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        from spark_gateway.main import serve
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install {' '.join(LIBRARIES)}"
        print(f"sparkd-gateway: {error.name} is not installed; {fix}", file=sys.stderr)
        return 1
    return serve(given)


def _make_key(name: str) -> int:
    try:
        key, line = make(name)
    except KeysError as error:
        print(f"sparkd-gateway: {error}", file=sys.stderr)
        return 1
    print(line)
    print(f"the key of {name}, shown only now: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run())
