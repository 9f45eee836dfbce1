"""Token ids to text while they arrive, exact to the byte.

A token may end inside a character; its bytes wait until the character is complete. What comes out, put together, is
the decoding of all the bytes at once: U+FFFD stands for bytes that are invalid in any continuation, and for a character
that the end of the stream cuts off.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from sparkd.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream of ids. With `skip_control` control tokens leave no trace, else their text shows.

    Those whose text is in `shown` show in any case.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = True, shown: Set[str] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """The characters that this token completes; may be empty."""
        if self._skip_control and self._tokenizer.is_control(index) and self._tokenizer.text(index) not in self._shown:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(index))

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD if a character was begun, else nothing."""
        return self._decoder.decode(b"", final=True)
