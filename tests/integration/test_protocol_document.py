"""docs/protocol.md is enough to write a client: it lists every message, and its own bytes hold a conversation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import daemon

from sparkd import errors
from sparkd.demo.main import MODEL as DEMO
from sparkd.ipc import messages, wire

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "protocol.md"


@pytest.fixture(scope="module")
def document() -> str:
    return DOCUMENT.read_text()


def test_tables_limits_and_examples_are_those_of_the_code(document: str) -> None:
    command = [sys.executable, "bench/make_protocol_document.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == document, "run: python bench/make_protocol_document.py --write"


def test_every_message_between_app_and_daemon_is_documented(document: str) -> None:
    ours = (ROOT / "sparkd" / "ipc" / "messages.py").read_text()
    declared = set(re.findall(r'^@message\("(\w+)"\)', ours, re.MULTILINE))
    documented = set(re.findall(r"^#### `([a-z_]+)`", document, re.MULTILINE))
    assert documented == declared and declared <= set(wire._TYPES)
    records = set(re.findall(r"^class (\w+):", re.sub(r"@message.*?\nclass \w+:", "", ours), re.MULTILINE))
    assert set(re.findall(r"^#### `([A-Z]\w+)`", document, re.MULTILINE)) == records


def test_every_error_code_is_documented(document: str) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SparkError)]
    codes = {kind.code for kind in kinds}
    for path in (ROOT / "sparkd" / "supervisor").glob("*.py"):
        codes |= set(re.findall(r'Failed\([^"()]*, "(\w+)"|_failed\(\w+, "(\w+)"', path.read_text()))
    found = {code for code in codes if isinstance(code, str)} | {
        code for pair in codes if isinstance(pair, tuple) for code in pair if code
    }
    (table,) = re.findall(r"\| code \| meaning.*?\n\n", document, re.DOTALL)
    assert {"protocol", "version", "timeout", "slow", "crashed"} <= found
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line))) == found


def test_the_documents_own_bytes_hold_a_conversation_without_our_client(document: str, tmp_path: Path) -> None:
    with daemon(DEMO, tmp_path / "run") as one:
        speaker = Path(__file__).with_name("speak_protocol.py")
        done = subprocess.run(
            [sys.executable, str(speaker), str(DOCUMENT), str(one.socket)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        understood = json.loads(done.stdout)
        assert understood["text"] == "I am Spark, a tiny mix"
        assert {"welcome", "pong", "tokens", "accepted", "chunk", "finished", "failed", "status_reply"} <= set(
            understood["heard"]
        )
        # Its connection has said goodbye: nothing of it is left.
        with one.client() as client:
            assert client.status()["requests"]["clients"] == 1


def test_the_first_words_of_another_version_are_answered_in_this_one(tmp_path: Path) -> None:
    import zmq

    with daemon(DEMO, tmp_path / "run") as one, zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(f"ipc://{one.socket}")
        sock.send(messages.encode(messages.Hello([2, 3], "from the future")))
        assert sock.poll(60_000)
        answer = messages.decode(sock.recv())
        assert (answer.code, answer.tag, answer.request) == ("version", None, None)
        assert "speaks version 1" in answer.message
