"""Chat messages to a prompt, through the template that the model file carries.

What messages may contain is written in `messages.py`, how a template is kept within bounds in `renderer.py`, and how
text of users is kept from spelling control tokens in `escape.py`. The prompt's BOS token is the template's business:
none is put before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sparkd.errors import RequestError, UnsupportedError
from sparkd.gguf.metadata import Metadata
from sparkd.text.escape import Escape
from sparkd.text.messages import Bounds, leading_system, plain_messages, plain_tools
from sparkd.text.renderer import Renderer
from sparkd.text.tokenizer import Tokenizer

Json = Any

#: Variables of a template that its caller may not set as options.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")

#: A template that is nothing but a reference to another file.
_INCLUDE = re.compile(r"\s*(\{#.*?#\}\s*)*\{%[-+]?\s*include\b[^%]*%\}\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat: what the model gets, and the text it stands for (for people)."""

    ids: list[int]
    text: str


class ChatTemplate:
    """The chat template of one model, with the process that renders it. Safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = "chat template") -> None:
        """Raises ModelFileError naming `where` if the template cannot be compiled."""
        self._tokenizer = tokenizer
        self._renderer = Renderer(source, where)
        self._escape = Escape(tokenizer.control_texts, self._renderer.literals)

    @property
    def tools(self) -> bool:
        """Whether it shows tools to the model."""
        return "tools" in self._renderer.variables

    @property
    def options(self) -> list[str]:
        """The variables that a request may set, by name."""
        return sorted(self._renderer.variables.difference(_RESERVED))

    @classmethod
    def from_metadata(cls, metadata: Metadata, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a model file; of a Laguna file that only includes one, the built-in layout.

        Raises UnsupportedError if there is none, ModelFileError if it cannot be compiled.
        """
        source = metadata.text("tokenizer.chat_template", "")
        if not source:
            fix = "send a prompt instead of messages"
            raise UnsupportedError("the model has no chat template", where=metadata.where, fix=fix)
        if _INCLUDE.fullmatch(source):
            if metadata.text("general.architecture") != "laguna":
                what = "the chat template only includes another file, which the model file lacks"
                raise UnsupportedError(what, where=metadata.where)
            source = files("sparkd.text").joinpath("laguna.jinja").read_text(encoding="utf-8")
        return cls(source, tokenizer, metadata.where)

    def encode(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Json] | None = None,
    ) -> ChatPrompt:
        """The prompt for these messages. `options` are the template's own variables (`enable_thinking` ...).

        No control token of the prompt comes from the messages, tools or options. Raises RequestError for messages that
        break the rules or a bound, or that the template refuses; UnsupportedError for what it would not look at.
        """
        self._check_known(options or {}, bool(tools))
        bounds = Bounds()
        request = {
            "messages": plain_messages(messages, bounds),
            "tools": plain_tools(tools, bounds),
            "options": _plain_options(options or {}, bounds),
        }
        request, restore = self._escape.apply(request)
        variables = {
            **request.pop("options"),
            **request,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._text(self._tokenizer.bos_id),
            "eos_token": self._text(self._tokenizer.eos_id),
        }
        rendered = self._render(variables)
        if restore is None:
            return ChatPrompt(self._tokenizer.encode(rendered, special=True), rendered)
        ids: list[int] = []
        for part in self._tokenizer.split_at_control(rendered):
            ids += [part] if isinstance(part, int) else self._tokenizer.encode(restore(part), special=False)
        return ChatPrompt(ids, restore(rendered))

    def _render(self, variables: dict[str, Json]) -> str:
        messages = variables["messages"]
        try:
            return self._renderer.render(variables)
        except RequestError:
            if all(message["role"] != "system" for message in messages[1:]):
                raise
        return self._renderer.render({**variables, "messages": leading_system(messages)})

    def close(self) -> None:
        """End the process that renders."""
        self._renderer.close()

    def _check_known(self, options: Mapping[str, Json], tools: bool) -> None:
        if tools and not self.tools:
            raise UnsupportedError("tools: the chat template of this model knows none", fix="send none")
        known = self.options
        unknown = next((name for name in options if name not in known and name not in _RESERVED), None)
        if unknown is not None:
            what = f"options.{unknown[:100]}: the chat template of this model has no such option"
            raise UnsupportedError(what, fix=f"it has: {', '.join(known) or 'none'}")

    def _text(self, index: int | None) -> str:
        return "" if index is None else self._tokenizer.text(index)


def _plain_options(options: Mapping[str, Json], bounds: Bounds) -> dict[str, Json]:
    reserved = next((name for name in options if name in _RESERVED), None)
    if reserved is not None:
        raise RequestError(f"options.{reserved}: cannot be set")
    plain: dict[str, Json] = bounds.plain(options, "options")
    return plain
