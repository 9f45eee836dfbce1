"""Speaks to a daemon with nothing but docs/protocol.md: its bytes go out, its tables say what may come back.

python speak_protocol.py DOCUMENT SOCKET      prints what it understood, as JSON
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import zmq

PATIENCE_MS = 60_000


class Tables:
    """The tables of messages and of maps within them: name to {field: (type, required)}."""

    def __init__(self, document: str) -> None:
        self.fields: dict[str, dict[str, tuple[str, bool]]] = {}
        for name, body in re.findall(r"^#### `(\w+)`\n\n(.*?)(?=\n#|\n<!--)", document, re.DOTALL | re.MULTILINE):
            rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| .* \|$", body, re.MULTILINE)
            self.fields[name] = {field: (kind.strip("`"), default == "required") for field, kind, default in rows}

    def check(self, name: str, body: dict) -> None:
        """Fail unless `body` has the fields of `name`, each of its type."""
        fields = self.fields[name]
        assert body.keys() <= fields.keys(), (name, body)
        for field, (kind, required) in fields.items():
            if field in body:
                assert self.is_a(kind, body[field]), (name, field, kind, body[field])
            else:
                assert not required, (name, field)

    def is_a(self, kind: str, value: object) -> bool:
        kind = kind.replace("`", "")
        if kind.endswith(" or nil"):
            return value is None or self.is_a(kind.removesuffix(" or nil"), value)
        if kind.startswith("list of "):
            return isinstance(value, list) and all(self.is_a(kind.removeprefix("list of "), item) for item in value)
        if kind in self.fields:
            assert isinstance(value, dict)
            self.check(kind, value)
            return True
        kinds = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,), "map": (dict,)}
        return isinstance(value, kinds[kind]) and (kind == "bool" or not isinstance(value, bool))


def examples(document: str) -> Iterator[tuple[str, dict, bytes]]:
    """(side, the message in JSON, its bytes) of each example, in order."""
    for side, text, digits in re.findall(r"```example (\w+)\n(.*?)\n(.*?)```", document, re.DOTALL):
        yield side, json.loads(text), bytes.fromhex(digits)


def main() -> None:
    """The app's side of the example conversation; waits for each message that the document shows before going on."""
    document = Path(sys.argv[1]).read_text()
    tables = Tables(document)
    heard: list[dict] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = PATIENCE_MS
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.connect(f"ipc://{sys.argv[2]}")

        def hear() -> dict:
            while True:
                assert sock.poll(PATIENCE_MS), f"silence after {heard[-1:]}"
                (frame,) = sock.recv_multipart()
                body = msgpack.unpackb(frame)
                assert body.pop("v") == 1
                tables.check(body["t"], {field: value for field, value in body.items() if field != "t"})
                heard.append(body)
                if body["t"] != "pong" or body["tag"] != 0:
                    return body

        for side, shown, data in examples(document):
            assert msgpack.unpackb(data) == shown, "the bytes are not what the text beside them says"
            if side == "app":
                sock.send(data)
                if shown["t"] == "status_request":
                    assert hear()["status"]["state"] == "ready"
                continue
            if shown["t"] == "progress":
                continue
            body = hear()
            while body["t"] == "progress":
                body = hear()
            if shown["t"] == "finished":
                while body["t"] == "chunk":
                    body = hear()
            assert body["t"] == shown["t"], (body, shown)
            for field in ("tag", "request", "reason", "code", "prompt_tokens", "stop"):
                assert body.get(field) == shown.get(field), (body, shown)
    assert not {"spark_client", "sparkd"} & {name.split(".")[0] for name in sys.modules}
    chunks = [body for body in heard if body["t"] == "chunk" and body["request"] == 2]
    assert [body["index"] for body in chunks] == [sum(len(b["tokens"]) for b in chunks[:n]) for n in range(len(chunks))]
    json.dump(
        {"text": "".join(body["text"] for body in chunks), "heard": sorted({body["t"] for body in heard})}, sys.stdout
    )


if __name__ == "__main__":
    main()
