"""Which requests are taken on: everything that can be said without the model's tokenizer is said here, at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sparkd.config import LimitSettings
from sparkd.errors import RequestError, UnsupportedError
from sparkd.ipc.messages import Generate, Tokenize
from sparkd.text.stop import check_stops
from sparkd.worker.limits import Room, check_length, check_logprobs, check_sampling, check_tokens, check_traffic_tag


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served: its name, the positions a request may have, the size of its vocabulary.

    `longest_token`: bytes of text that one token stands for at most; 0: not known.
    """

    model: str
    room: Room
    vocab: int
    longest_token: int = 0


def fitted(ask: Generate, served: Served) -> Generate:
    """The request with no more output tokens than could fit, if it allows that."""
    if not ask.shorten:
        return ask
    room = max(1, served.room.positions - len(ask.tokens or [0]))
    return dataclasses.replace(ask, max_tokens=min(ask.max_tokens, room))


def check_tokenize(ask: Tokenize) -> None:
    """Raise RequestError or UnsupportedError for what cannot be tokenized."""
    if (ask.text is None) == (ask.chat is None):
        raise RequestError("either text or chat is tokenized")
    for name, value in (("tools", ask.tools), ("options", ask.options)):
        if value and ask.chat is None:
            raise UnsupportedError(f"{name} belong to chat, not to text")
    if ask.special and ask.chat is not None:
        raise UnsupportedError("special belongs to text, not to chat")


def check(ask: Generate, served: Served, limits: LimitSettings) -> None:
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
    if ask.parts and ask.chat is None:
        raise UnsupportedError(f"parts belong to the answer to a chat, not to {given[0]}")
    if ask.call is not None:
        _check_call(ask)
    if ask.max_tokens < 1:
        raise RequestError(f"max_tokens is {ask.max_tokens}", fix="ask for one token at least")
    if ask.credit < 0:
        raise RequestError(f"credit is {ask.credit}", fix="grant none (0) or some")
    if ask.timeout_s is not None and not 0 < ask.timeout_s <= limits.timeout_s:
        what = f"timeout_s is {ask.timeout_s:g}"
        raise RequestError(what, fix=f"give more than 0 and at most limits.timeout_s = {limits.timeout_s:g}")
    check_sampling(ask.sampling, served.vocab)
    check_logprobs(ask.logprobs)
    check_stops(ask.stop)
    check_traffic_tag(ask.traffic_tag)
    if ask.tokens is not None:
        check_tokens(ask.tokens, served.vocab)
        check_length(len(ask.tokens), ask.max_tokens, served.room, shorten=ask.shorten)
    else:
        check_length(_least(ask.prompt, served), ask.max_tokens, served.room, shorten=ask.shorten, counted=False)


def _check_call(ask: Generate) -> None:
    if not ask.parts:
        raise RequestError("call is given without parts", fix="ask for parts: a call is no text")
    functions = [tool.get("function") for tool in ask.tools or []]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if not names or (ask.call and ask.call not in names):
        what = f"call names the tool {ask.call!r}" if ask.call else "call asks for a tool"
        raise RequestError(f"{what}, which tools does not have"[:300], fix="give it in tools")


def _least(prompt: str | None, served: Served) -> int:
    """Tokens that a prompt has at least, however it is cut into them; the worker counts."""
    if prompt is None or not served.longest_token:
        return 1
    return max(1, -(-len(prompt.encode(errors="surrogatepass")) // served.longest_token))
