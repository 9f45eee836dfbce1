"""What all dialects have in common on their way to the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from spark_client import AsyncClient, Parameters
from spark_gateway.answer import Answer
from spark_gateway.body import Body
from spark_gateway.errors import ApiError, refused

#: More output tokens than any context holds: as many as there is room for.
_ALL = 1 << 30
_EFFORTS = {"none": False, "minimal": True, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
#: What `sampling` of the settings may name.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Sampling(Body):
    """Options of OpenAI's dialect, and the usual ones beyond it, under the daemon's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None


@dataclass
class Call:
    """One request for the daemon: what is asked, and its parameters. `names`: see `errors.of_client`."""

    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    names: dict[str, str] = field(default_factory=dict)

    def sample(self, body: Sampling, defaults: Mapping[str, Any]) -> None:
        """Take the sampling options of a body, over the defaults."""
        given = {name: getattr(body, name) for name in Sampling.model_fields}
        self.parameters |= {**defaults, **{name: value for name, value in given.items() if value is not None}}

    def limit(self, max_tokens: int | None, option: str = "max_tokens") -> None:
        """Output tokens at most; as many as fit in any case."""
        if max_tokens is not None and max_tokens < 1:
            raise refused(option, f"is {max_tokens}, ask for one token at least", "invalid_value")
        self.parameters |= {"max_tokens": min(max_tokens or _ALL, _ALL), "shorten": True}

    def stop(self, stop: str | Sequence[str] | None) -> None:
        """Stop strings."""
        if stop:
            self.parameters["stop"] = [stop] if isinstance(stop, str) else list(stop)

    def think(self, effort: str | None, option: str) -> None:
        """Switch the model's thought on or off; templates know no more of effort than that."""
        if effort is None:
            return
        if effort not in _EFFORTS:
            raise refused(option, f"is {effort[:40]!r}, not one of {', '.join(_EFFORTS)}", "invalid_value")
        self.switch_thought(_EFFORTS[effort], option)

    def switch_thought(self, on: bool, option: str) -> None:
        """Have the model think first, or not, unless the request has said so elsewhere."""
        if "enable_thinking" not in self.options:
            self.options["enable_thinking"] = on
            self.names["options.enable_thinking"] = option

    def choose(self, choice: str, name: str = "") -> None:
        """Whether a tool is called: `auto`, `none`, `required`, or `named`."""
        if choice == "none":
            self.tools = None
        elif choice in ("required", "named"):
            functions = [tool.get("function") for tool in self.tools or []]
            if not functions:
                raise refused("tool_choice", "asks for a tool, but there are no tools", "invalid_value")
            if name and name not in [one.get("name") for one in functions if isinstance(one, dict)]:
                raise refused("tool_choice", f"names {name[:100]!r}, which is not among the tools", "invalid_value")
            self.parameters["call"] = name
            # What thinks first does not begin with a call.
            self.options.pop("enable_thinking", None)

    async def start(self, client: AsyncClient) -> Answer:
        """Ask the daemon; the errors of `AsyncClient`."""
        parameters = cast("Parameters", self.parameters)
        if self.prompt is not None:
            if isinstance(self.prompt, str):
                return Answer(await client.generate(self.prompt, **parameters))
            return Answer(await client.generate(tokens=self.prompt, **parameters))
        self.parameters["parts"] = True
        stream = await client.chat(self.messages, tools=self.tools or None, options=self.options, **parameters)
        return Answer(stream, parallel=self.parallel)


def defaults_of(text: str) -> dict[str, float | int]:
    """Sampling defaults as the settings write them: `temperature=1.0 top_k=20`. ValueError."""
    found: dict[str, float | int] = {}
    for pair in text.split():
        name, _, value = pair.partition("=")
        if name not in _DEFAULTS:
            raise ValueError(f"unknown sampling default {name!r}; there are: {', '.join(_DEFAULTS)}")
        found[name] = int(value) if name == "top_k" else float(value)
    return found


def check_model(asked: str, served: str, aliases: frozenset[str]) -> None:
    """ApiError (404) for a model that is not served here."""
    if asked not in ("", served) and asked not in aliases and "*" not in aliases:
        what = f"model {asked[:200]!r} is not served here, {served!r} is"
        raise ApiError(404, what, "model", "model_not_found")
