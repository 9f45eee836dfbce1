"""The process that renders one model's chat template: a script, started by `renderer.Renderer`.

A template is a program that came with a model file. It runs here, in a jinja2 sandbox, under a memory limit and a timer
of processor time that ends the process: both hold whatever the template does, also inside one C call.

Standard input is a socket. Each message, both ways, is one line, a JSON object:

    {"template": source}                    →  {"literals": [constant texts], "variables": [names it asks for]}
    {"variables": {...}}                    →  {"text": rendered}
    either                                  →  {"error": kind, "reason": text}

with kind `refused` (the template called raise_exception), `size`, `memory`, `failed`. The process ends with its socket.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.debug  # loaded lazily by jinja2 when a template fails, which may be when no memory is left
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(TemplateError):
    """The template called raise_exception."""


class TooLong(Exception):
    """The template wrote more than it may."""


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` only marks what the assistant said: the body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(reason: object) -> None:
    """Called by templates: these messages cannot be rendered."""
    raise Refused(str(reason))


def strftime_now(form: str) -> str:
    """Called by templates: the local time."""
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the escaping for HTML that jinja2's own applies."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates of model files are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


def literals(env: ImmutableSandboxedEnvironment, source: str) -> list[str]:
    """The constant texts of a template: what stands between its tags, and its string constants."""
    tree = env.parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    return sorted(texts | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})


class Answerer:
    """Holds the compiled template and answers one request after another."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._environment = environment()
        self._template: jinja2.Template | None = None

    def answer(self, request: dict[str, Any]) -> bytes:
        """The encoded reply; never raises for what a template does."""
        try:
            reply = self._load(request["template"]) if "template" in request else self._render(request["variables"])
            return json.dumps(reply, ensure_ascii=False).encode()
        except Refused as error:
            return failure("refused", str(error))
        except TooLong:
            return failure("size", "")
        except MemoryError:
            return failure("memory", "")
        except Exception as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            return failure("failed", f"{type(error).__name__}: {error}{line}")

    def _load(self, source: str) -> dict[str, Any]:
        self._template = self._environment.from_string(source)
        asked = meta.find_undeclared_variables(self._environment.parse(source)) - self._environment.globals.keys()
        return {"literals": literals(self._environment, source), "variables": sorted(asked)}

    def _render(self, variables: dict[str, Any]) -> dict[str, Any]:
        assert self._template is not None
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > self._max_characters:
                raise TooLong
            pieces.append(piece)
        return {"text": "".join(pieces)}


def failure(kind: str, reason: str) -> bytes:
    """An encoded error reply: one line, bounded."""
    return json.dumps({"error": kind, "reason": " ".join(reason[:1000].split())[:300]}).encode()


def serve(connection: socket.socket, answer: Callable[[dict[str, Any]], bytes], seconds: float) -> None:
    """Answer until the other side closes; a request that takes more processor time than `seconds` ends the process."""
    with connection.makefile("rb") as requests:
        for line in requests:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = answer(json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(reply + b"\n")


def main() -> None:
    """Arguments: processor seconds for one request, bytes of address space, characters that a template may write."""
    seconds, memory, characters = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the daemon, whose end closes the socket
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    serve(socket.socket(fileno=0), Answerer(characters).answer, seconds)


if __name__ == "__main__":
    main()
