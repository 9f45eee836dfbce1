"""What the gateway tells of daemon and model, made of the status document (docs/status.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

Status = Mapping[str, Any]


def model_of(status: Status, name: str) -> dict[str, Any]:
    """The served model under one of its names, in the words of both dialects: it was made when the daemon started.

    Beyond these: `context_length` (positions one request may have), and what the chat template has.
    """
    made = {"id": name, "object": "model", "created": status["started"], "owned_by": "sparkd"}
    born = datetime.fromtimestamp(status["started"], UTC).isoformat().replace("+00:00", "Z")
    made |= {"type": "model", "display_name": name, "created_at": born, "lifecycle": "active"}
    return {**made, "context_length": status["model"]["context"], "chat": chat_of(status)}


def chat_of(status: Status) -> dict[str, Any] | None:
    """What conversations may hold; None while nobody knows, which a worker does about half a second after its start."""
    chat = status["chat"]
    if not chat:
        return None
    return {"tools": chat["tools"], "thinking": "enable_thinking" in chat["options"]}


def props_of(status: Status, aliases: Collection[str], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Model, defaults and limits; `limits.context_from` says whether the context is the setting's or the model's."""
    model, limits = status["model"], status["settings"]["limits"]
    holds = "model" if model["context"] == model["model_context"] else "limits.context"
    return {
        "version": status["version"],
        "model": {name: model[name] for name in ("name", "architecture", "context", "model_context", "vocab")},
        "chat": chat_of(status),
        "aliases": sorted(aliases),
        "defaults": {"max_tokens": "as many as the context has room for", **defaults},
        "limits": {
            "context": model["context"],
            "context_from": holds,
            **{name: limits[name] for name in ("sequences", "queue", "timeout_s")},
        },
    }


def health_of(status: Status) -> dict[str, Any]:
    """Whether requests are served, and why not."""
    state, reason, loading = status["state"], status["reason"], status["loading"]
    if state == "loading" and not reason and loading["total_bytes"]:
        share = 100 * loading["done_bytes"] // loading["total_bytes"]
        reason = f"the model is being loaded: {share} % of {loading['total_bytes']} bytes"
    elif state != "ready" and not reason:
        reason = f"the daemon is {state}"
    return {"live": True, "ready": state == "ready", "state": state, "reason": reason}
