"""Which requests are taken on: everything that can be said without the model's tokenizer is said here, at once."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.errors import RequestError, UnsupportedError
from sparkd.ipc.messages import Generate
from sparkd.worker.limits import check_length, check_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served: its name, the positions a request may have, and the size of its vocabulary."""

    model: str
    context: int
    vocab: int


def check(ask: Generate, served: Served) -> None:
    """Raise RequestError or UnsupportedError for a request that cannot be served, naming what is wrong with it."""
    if ask.model not in ("", served.model):
        what = f"model {ask.model!r} is not served here"
        raise RequestError(what[:300], fix=f"name {served.model!r}, or no model at all")
    given = [name for name in ("prompt", "tokens", "chat") if getattr(ask, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(f"a request has one of prompt, tokens and chat, this one has {found}")
    for name, value in (("tools", ask.tools), ("options", ask.options)):
        if value and ask.chat is None:
            raise UnsupportedError(f"{name} belong to chat, not to {given[0]}")
    if ask.max_tokens < 1:
        raise RequestError(f"max_tokens is {ask.max_tokens}", fix="ask for one token at least")
    if ask.credit < 0:
        raise RequestError(f"credit is {ask.credit}", fix="grant none (0) or some")
    if ask.tokens is not None:
        check_tokens(ask.tokens, served.vocab)
    check_length(len(ask.tokens) if ask.tokens is not None else 1, ask.max_tokens, served.context)
