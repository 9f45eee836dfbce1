"""The command `sparkd-gateway`; also python -m spark_gateway."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the gateway, or say what it lacks: its libraries are no part of a plain install."""
    try:
        from spark_gateway.main import main
    except ModuleNotFoundError as error:
        print(f"sparkd-gateway: {error.name} is not installed; pip install 'sparkd[gateway]'", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(run())
