"""Text from tokens as they come, up to the first stop text."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, special ones left out."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes an unfinished UTF-8 sequence to."""

_MAX_UNFINISHED = 16
"""Tokens that may wait for the end of a character: one is at most four bytes, so more of them are no text."""


class TextStream:
    """The text of one request.

    Tokens are decoded together with those just before them, as a tokenizer may write a token differently at the
    beginning of a text. What ends within a character waits for the rest of it; what may be the beginning of a stop text
    waits until it is known whether it is.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0
        """First token of those that are decoded for their influence on the next ones."""
        self._num_decoded = 0
        """Tokens whose text is out, or held."""
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Take a token; return new text that will not change any more."""
        self._tokens.append(token)
        self._held += self._take_decoded(is_last=False)
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        return self._release(self._num_held())

    def finish(self) -> str:
        """The text that still waits, when no more tokens will come."""
        if self.is_stopped:
            return ""
        self._held += self._take_decoded(is_last=True)
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        self.is_stopped = bool(found)
        return self._held[: min(found)] if found else self._release(0)

    def _take_decoded(self, *, is_last: bool) -> str:
        before = self._decode(self._tokens[self._context : self._num_decoded])
        after = self._decode(self._tokens[self._context :])
        num_waiting = len(self._tokens) - self._num_decoded
        if after.endswith(_REPLACEMENT) and not is_last and num_waiting < _MAX_UNFINISHED:
            return ""
        self._context, self._num_decoded = self._num_decoded, len(self._tokens)
        return after[len(before) :]

    def _num_held(self) -> int:
        """How many of the last characters may be the beginning of a stop text."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, num_kept: int) -> str:
        cut = len(self._held) - num_kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text
