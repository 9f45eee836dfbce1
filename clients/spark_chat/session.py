"""One chat: lines in, answers out as they come.

    waiting for a line ──text──► answering ──end, Ctrl-C, refusal──► waiting for a line
          └──/quit, end of the input──► over

A connection is made when it is needed and made again after it was lost: the conversation is kept here, a daemon that
was restarted goes on with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from spark_chat.conversation import Conversation
from spark_client import Chunk, Client, ConnectionFailed, Finished, Parameters, Progress, RequestFailed, Stream
from sparkctl.plain import counted, printable
from sparkctl.speaker import Speaker

HELP = """\
/help           this list
/clear          forget the conversation; the system message stays
/system TEXT    set the system message; without TEXT show it, /system none removes it
/quit           leave; so does Ctrl-D
//text          say a text that begins with a slash
A line that ends in \\ goes on in the next. Ctrl-C ends an answer."""
_PROMPT, _MORE = "> ", "… "
#: Back to the start of the line and clear it.
_WIPE = "\r\x1b[K"


class Session:
    """The chat at one terminal, or over one pipe."""

    def __init__(self, socket: Path | None, system: str, options: Mapping[str, object], parameters: Parameters) -> None:
        self._socket = socket
        self._options = options
        self._parameters = parameters
        self._conversation = Conversation(system)
        self._client: Client | None = None
        self._interactive = sys.stdin.isatty()
        self._terminal = sys.stdout.isatty()

    def run(self) -> int:
        """Until /quit or the end of the input. From a pipe, the first failure is raised (SparkClientError)."""
        server = self._connected().server
        if self._interactive:
            # Importing it is what makes input() edit lines and remember them.
            import readline  # noqa: F401

            self._note(f"{printable(server.model)} on {printable(server.server)}; /help lists commands, Ctrl-D leaves")
        for line in self._lines():
            if line.startswith("/") and not line.startswith("//"):
                if not self._command(line):
                    break
            elif line.strip():
                self._turn(line.removeprefix("/") if line.startswith("//") else line)
        return 0

    def close(self) -> None:
        """Leave the daemon."""
        if self._client is not None:
            self._client.close()

    # ---- input ----

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._line()
            except EOFError:
                if self._interactive:
                    self._note("")
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("\n(Ctrl-D or /quit leaves)")

    def _line(self) -> str:
        """One line, with those that it goes on in. EOFError at the end."""
        text = self._read(_PROMPT)
        while text.endswith("\\"):
            try:
                text = text[:-1] + "\n" + self._read(_MORE)
            except EOFError:
                return text[:-1]
        return text

    def _read(self, prompt: str) -> str:
        if self._interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _command(self, line: str) -> bool:
        """Do what a line with a slash says; false when it says to leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._note(HELP)
            case "/clear":
                self._note(f"forgot {counted(self._conversation.turns, 'turn')}")
                self._conversation.clear()
            case "/system":
                self._system(rest.strip())
            case _:
                self._note(f"no command {printable(name)}; /help lists them, //text says a text with a slash")
        return True

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "none" else text
        self._note(f"system message: {printable(self._conversation.system) or '(none)'}")

    # ---- turns ----

    def _turn(self, text: str) -> None:
        self._conversation.say(text)
        try:
            self._answer()
        except (RequestFailed, ConnectionFailed) as error:
            self._conversation.take_back()
            if not self._interactive:
                raise
            self._note(f"spark-chat: {printable(error)}")

    def _answer(self) -> None:
        """Stream one answer. Ctrl-C ends it; what came until then is part of the conversation."""
        stream: Stream | None = None
        try:
            with self._connected().chat(
                self._conversation.messages, options=self._options, **self._parameters
            ) as stream:
                self._show(stream)
        except ConnectionFailed:
            self._client = None
            raise
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._note("\n(cut short)")
            if stream is None or not stream.text:
                self._conversation.take_back()
                return
        self._conversation.hear(stream.text)

    def _show(self, stream: Stream) -> None:
        waiting, speaker = False, Speaker()
        for event in stream.events():
            match event:
                case Progress() if self._terminal:
                    waiting = True
                    self._write(_WIPE + _doing(event))
                case Chunk():
                    self._write(_WIPE if waiting else "")
                    waiting = False
                    speaker.say(event)
                case Finished():
                    self._write(_WIPE if waiting else "")
                    speaker.end()
                    if event.reason == "length" and self._interactive:
                        self._note(f"(stopped after {event.output_tokens} tokens; --max-tokens allows more)")

    def _connected(self) -> Client:
        if self._client is None:
            self._client = Client(self._socket, name="spark-chat")
        return self._client

    # ---- output ----

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        """A line that is no answer: to standard error, so that a pipe holds answers alone."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _doing(progress: Progress) -> str:
    if progress.stage == "queued":
        return f"({counted(progress.position, 'request')} before this one)"
    return f"(reading, {100 * progress.done // max(progress.total, 1)} %)"
