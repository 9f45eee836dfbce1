"""What an app may ask for, in the words of both clients: keyword arguments in, fields of `messages.Generate` out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from spark_client import messages as m


class Parameters(TypedDict, total=False):
    """Keyword arguments of every request; the daemon refuses impossible values.

    model: the name of the one that is served, or "" (the default) for whichever it is.
    temperature: 0 (the default) takes the best token each time.
    top_k, top_p, min_p: sample from the k best, from the best that sum up to p, from those at least p times as likely
        as the best; 0, 1 and 0 (the defaults) filter nothing.
    repetition_penalty (1: none), presence_penalty, frequency_penalty (0: none): make what was there less likely.
    logit_bias: added to the logits of these tokens.
    seed: the same seed gives the same tokens; without one it is drawn (`Output.seed` tells it).
    stop: strings before which the output ends.
    max_tokens: output tokens at most (256).
    ignore_eos: go on after the model's end token.
    logprobs: how many of the most likely tokens are named beside each chosen one (`Output.choices`); None: nothing is.
    parts: give an answer in parts: thought, text, and calls of tools (`Output.reasoning`, `Output.calls`).
    call: make the answer a call of the tool of this name, "": of any; only with parts and tools.
    shorten: fewer output tokens than max_tokens will do if the context has no room for so many.
    timeout_s: seconds after which the request fails, wherever it is then; None: the daemon's limit.
    traffic_tag: a name for the kind of traffic ("coding", "legal"): what experts it uses is learned under that name.
    """

    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: Sequence[str]
    max_tokens: int
    ignore_eos: bool
    logprobs: int | None
    timeout_s: float | None
    parts: bool
    call: str | None
    traffic_tag: str
    shorten: bool


_SAMPLING = {field.name for field in dataclasses.fields(m.Sampling)}


def continuing(prompt: str | None, tokens: Sequence[int] | None, parameters: Parameters) -> dict[str, Any]:
    """Fields of a request that continues a text, or token ids. ValueError when it is not exactly one of them."""
    if (prompt is None) == (tokens is None):
        raise ValueError("give either a prompt or tokens")
    return {"prompt": prompt, "tokens": None if tokens is None else list(tokens), **_fields(parameters)}


def answering(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    parameters: Parameters,
) -> dict[str, Any]:
    """Fields of a request that answers a conversation."""
    return {**prompting(messages, tools, options), **_fields(parameters)}


def prompting(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The fields that a conversation's prompt is made of."""
    return {
        "chat": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "options": dict(options or {}),
    }


def _fields(parameters: Parameters) -> dict[str, Any]:
    """TypeError for a parameter that does not exist."""
    given = dict(cast("Mapping[str, Any]", parameters))
    if unknown := given.keys() - Parameters.__annotations__.keys():
        raise TypeError(f"unknown parameter {min(unknown)!r}; there are: {', '.join(Parameters.__annotations__)}")
    if "stop" in given:
        given["stop"] = list(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = [m.Bias(token, bias) for token, bias in given["logit_bias"].items()]
    sampling = {name: given.pop(name) for name in _SAMPLING & given.keys()}
    return {**given, "sampling": m.Sampling(**sampling)}
