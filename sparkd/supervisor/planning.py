"""Has the plan made by a short child, so that the supervisor never carries a parsed model through its life."""

from __future__ import annotations

import json
import subprocess
import sys

from sparkd import errors
from sparkd.config import Settings
from sparkd.errors import SparkError
from sparkd.store.planned import Plan


def plan(settings: Settings, held: int = 0, kept: int = 0) -> Plan:
    """What the model of `settings` needs; the SparkError that speaks against it, as the child found it.

    `held` bytes are in use already by an arena of size `kept` that may be used again.
    """
    command = [sys.executable, "-P", "-m", "sparkd.store.plan", "--settings", settings.to_json()]
    command += ["--held", str(held), "--kept", str(kept)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    answer = json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout else None
    if answer is None:
        raise RuntimeError(f"the plan ended with status {done.returncode}")
    if done.returncode == 0:
        return Plan(**answer)
    kinds = {
        kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SparkError)
    }
    raise kinds[answer["code"]](answer["error"])
