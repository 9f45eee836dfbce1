"""What people write stays between them and the model: neither text nor token ids are in status, logs or files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemon import PATIENCE_S, daemon

from spark_client import SparkClientError
from sparkd.demo.main import MODEL as DEMO

MARKER = "Xylophonic marmalade zebra"


def test_no_text_and_no_token_ids_are_in_status_logs_profiles_or_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    said: list[str] = []
    with daemon(DEMO, tmp_path / "run", log={"level": "debug"}, limits={"context": 400}) as one, one.client() as client:
        ids = client.tokenize(f"{MARKER} tokenized")
        requests = [
            client.generate(f"{MARKER} generated", max_tokens=20, ignore_eos=True, stop=[f"{MARKER} stop"]),
            client.generate(tokens=ids, max_tokens=20, ignore_eos=True, logprobs=3),
            client.chat([{"role": "user", "content": f"{MARKER} chatted"}], max_tokens=20),
        ]
        said.append(json.dumps(client.status()))
        outputs = []
        for stream in requests:
            stream.read(PATIENCE_S)
            outputs.append(stream.tokens)
        said.append(json.dumps(client.status()))
        one.kill("worker")
        for refused in (f"{MARKER} " * 300, "\ud800"):
            with pytest.raises(SparkClientError):
                client.generate(f"{MARKER} {refused}", max_tokens=20).read(PATIENCE_S)
        with pytest.raises(SparkClientError):
            client.chat([{"role": MARKER, "content": "x"}], max_tokens=20).read(PATIENCE_S)
        one.ready()
        cancelled = client.generate(f"{MARKER} cancelled", max_tokens=300, ignore_eos=True)
        cancelled.cancel()
        cancelled.read(PATIENCE_S)
        said.append(json.dumps(client.status()))
        assert one.stop() == 0
    profiles = list((state / "sparkd").iterdir())
    assert len(profiles) == 1
    said += [one.said(), profiles[0].read_text()]
    assert not list((tmp_path / "run").iterdir())
    written = "\n".join(said)
    for word in MARKER.split():
        assert word.lower() not in written.lower()
    for tokens in [ids, *outputs]:
        assert len(tokens) >= 8
        for listed in (json.dumps(tokens[:8]), str(tokens[:8]), ",".join(map(str, tokens[:8])), str(tokens[:8])[1:-1]):
            assert listed not in written
    lines = [line for line in one.said().splitlines() if "request ended" in line]
    assert len(lines) >= len(requests) + 1
    assert sum("reason=length" in line and "output_tokens=20" in line for line in lines) >= 2
