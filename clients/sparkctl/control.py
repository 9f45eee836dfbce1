"""`sparkctl stop`, `drain` and `reload`: signals to the daemon, and what comes of them."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack, closing
from typing import Any

from spark_client import Client, SparkClientError
from spark_client.address import find_socket
from sparkctl.plain import printable, write_json
from sparkctl.process import DaemonProcess

#: Seconds between two looks at the daemon.
_LOOK_S = 0.25


def stop(args: argparse.Namespace) -> int:
    """End the daemon at once: running requests end with the reason. The second signal is what makes it hurry."""
    return _end(args, signal.SIGTERM, signal.SIGINT)


def drain(args: argparse.Namespace) -> int:
    """End the daemon; what runs may finish first, as long as the daemon grants."""
    return _end(args, signal.SIGTERM)


def reload(args: argparse.Namespace) -> int:
    """Have the daemon read its settings again and start what had given up, and tell what came of it."""
    socket = args.socket or find_socket()
    with closing(DaemonProcess.at(socket)) as daemon, _client(args) as client:
        if daemon.on_terminal:
            raise SparkClientError(
                f"process {daemon.pid} runs on the terminal {daemon.log}, where the signal to read settings again"
                " would end it: restart it instead"
            )
        before = client.status().get("reload", {}).get("count", 0)
        daemon.send(signal.SIGHUP)
        outcome = _reloaded(client, before, time.monotonic() + args.wait)
    if outcome is None:
        raise SparkClientError(f"process {daemon.pid} has not read its settings within {args.wait:g} s")
    if args.json:
        write_json(outcome)
    else:
        print("applied: " + (", ".join(outcome["applied"]) or "nothing has changed that a reload can change"))
        if outcome["restart"]:
            print("need a restart: " + ", ".join(outcome["restart"]))
        if outcome.get("revived"):
            print("started once more: " + printable(", ".join(outcome["revived"])))
    if outcome["error"]:
        raise SparkClientError(printable(outcome["error"]))
    return 0


def _reloaded(client: Client, before: int, deadline: float) -> dict[str, Any] | None:
    while time.monotonic() < deadline:
        outcome: dict[str, Any] = client.status().get("reload", {})
        if outcome.get("count", 0) > before:
            return outcome
        time.sleep(_LOOK_S)
    return None


def _end(args: argparse.Namespace, *signals: signal.Signals) -> int:
    with closing(DaemonProcess.at(args.socket or find_socket())) as daemon, ExitStack() as stack:
        client = _connected(args, stack)
        for number in signals:
            daemon.send(number)
        deadline, said = time.monotonic() + args.wait, ""
        while not daemon.ended(_LOOK_S):
            if time.monotonic() >= deadline:
                raise SparkClientError(
                    f"process {daemon.pid} still runs after {args.wait:g} s: wait, or end its requests with"
                    f" 'sparkctl stop'; if nothing helps, kill -9 {daemon.pid} (what apps have asked is lost then)"
                )
            line = _doing(client)
            if line and line != said:
                print(line, file=sys.stderr, flush=True)
                said = line
    if args.json:
        write_json({"pid": daemon.pid, "ended": True})
    else:
        print(f"process {daemon.pid} has ended")
    return 0


def _connected(args: argparse.Namespace, stack: ExitStack) -> Client | None:
    """A connection to look on with; a daemon that hangs is signalled without."""
    try:
        return stack.enter_context(_client(args))
    except SparkClientError:
        return None


def _doing(client: Client | None) -> str:
    """What the daemon says it does; empty when it says nothing any more."""
    try:
        status = client.status() if client is not None else None
    except SparkClientError:
        return ""
    if status is None:
        return ""
    running, queued = status["requests"]["running"], status["requests"]["queued"]
    return f"{printable(status['state'])}: requests that run: {running}, that wait: {queued}"


def _client(args: argparse.Namespace) -> Client:
    return Client(args.socket, timeout=args.timeout, name="sparkctl")
