"""`sparkctl tokenize`."""

from __future__ import annotations

import argparse

from spark_client import Client
from sparkctl.generate import read_text
from sparkctl.plain import write_json


def run(args: argparse.Namespace) -> int:
    """Print the ids on one line, separated by spaces."""
    text = read_text(args.text, args.parser)
    with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
        tokens = client.tokenize(text, special=args.special)
    if args.json:
        write_json({"tokens": tokens})
    else:
        print(*tokens)
    return 0
