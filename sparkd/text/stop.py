"""Stop strings in a stream of text, wherever its pieces are cut.

The rule, independent of the cuts: the match that *starts* first in the text ends it; of several that start there, the
shortest. The text ends before the match. Besides the strings that a request names there are those by which a model of
some architectures says that its turn is over, where no end token does (`end_texts`).

    searching ──push: no match──► searching     text is given out up to the first place where a stop string
        │                                       matches or might still match; the rest waits
        └──push or finish: match──► stopped     nothing is given out any more
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkd.errors import RequestError

#: Bounds of what a request may ask for.
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
_END_TEXTS = {"laguna": ("</assistant>",)}


def end_texts(architecture: str) -> tuple[str, ...]:
    """What models of an architecture may spell with ordinary tokens to end their turn."""
    return _END_TEXTS.get(architecture, ())


def check_stops(stops: Sequence[str]) -> None:
    """RequestError for empty, too long or too many stop strings."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings are more than the limit of {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"stop: a string has {len(stop)} characters, not 1 to {MAX_STOP_CHARACTERS}")


class StopMatcher:
    """Watches one stream for the `stops` of a request and the `ends` of the model itself."""

    def __init__(self, stops: Sequence[str], ends: Sequence[str] = ()) -> None:
        """RequestError as `check_stops` raises it."""
        check_stops(stops)
        self._asked = frozenset(stops)
        self._stops = sorted({*stops, *ends}, key=len)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        #: The string that ended the text.
        self.stopped: str | None = None

    @property
    def asked(self) -> str | None:
        """The stop string of the request that ended the text; None before that, and where the model itself ended it."""
        return self.stopped if self.stopped in self._asked else None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; returns the text that is safe to give out and the stop string that matched, if any."""
        return self._search(text, at_end=False)

    def finish(self) -> tuple[str, str | None]:
        """The stream is over: returns the rest of the text, and the stop string if one matches in it."""
        return self._search("", at_end=True)

    def _search(self, text: str, *, at_end: bool) -> tuple[str, str | None]:
        if self.stopped is not None:
            return "", self.stopped
        held = self._held + text
        for start, character in enumerate(held):
            if character not in self._firsts:
                continue
            self.stopped = next((stop for stop in self._stops if held.startswith(stop, start)), None)
            if self.stopped is not None:
                self._held = ""
                return held[:start], self.stopped
            rest = len(held) - start
            if not at_end and any(len(stop) > rest and stop.startswith(held[start:]) for stop in self._stops):
                self._held = held[start:]
                return held[:start], None
        self._held = ""
        return held, None
