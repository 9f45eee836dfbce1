"""A status document as docs/status.md describes it, with what the gateway shows."""

from __future__ import annotations

from typing import Any


def document(state: str = "ready", reason: str = "") -> dict[str, Any]:
    memory = ("arena", "core", "records", "locked", "huge", "state", "state_used")
    return {
        "version": "0.1.0",
        "started": 1_700_000_000,
        "uptime_s": 5.0,
        "state": state,
        "reason": reason,
        "model": {
            "name": "model",
            "architecture": "laguna",
            "path": "/m",
            "context": 100,
            "model_context": 900,
            "vocab": 50,
        },
        "memory": {f"{name}_bytes": 1 << n for n, name in enumerate(memory)},
        "processes": [{"role": "worker", "pid": 7, "state": "ready", "rss_bytes": 9, "restarts": 2, "reason": ""}],
        "loading": {"done_bytes": 1, "total_bytes": 1},
        "residency": {
            "records": 8,
            "resident": 6,
            "layers": [{"records": 4, "resident": 4}, {"records": 4, "resident": 2}],
            "slabs": [],
            "uses": {"decode": {"uses": 80, "misses": 4}, "prefill": {"uses": 9, "misses": 1}},
        },
        "requests": {
            "running": 1,
            "queued": 2,
            "clients": 3,
            "accepted": 4,
            "finished": 5,
            "refused": 9,
            "failed": 6,
            "cancelled": 7,
            "output_tokens": 8,
        },
        "open_requests": [],
        "speed": {"prefill_tokens_s": 10.0, "decode_tokens_s": 2.5, "steps": 9, "chunk_rows": 1},
        "calibration": {"decode": {"rows": 3, "counts": [[1, 0, 2, 0], [0, 0, 0, 3]]}},
        "settings": {"limits": {"context": 100, "sequences": 2, "queue": 3, "timeout_s": 9.0}},
        "notes": [],
        "chat": {"tools": True, "options": ["enable_thinking"], "missing": ""},
    }
