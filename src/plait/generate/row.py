"""One request of a batch: what of it is in the cache, the text so far, and when it has ended."""

from collections.abc import Collection

from plait.generate.request import Event, FinishReason, Request
from plait.generate.sampling.sample import Draw
from plait.generate.text import Decode, TextStream


class Row:
    """A request that holds a row of the cache."""

    def __init__(self, request: Request, decode: Decode, max_context: int) -> None:
        self.request = request
        self.num_read = 0
        """Tokens of the prompt that are in the cache."""
        self.last_token: int | None = None
        self.num_new = 0
        self._text = TextStream(decode, request.sampling.stop)
        self._max_new = min(request.sampling.max_new_tokens, max_context - len(request.prompt))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return self.num_prompt - self.num_read

    @property
    def num_cached(self) -> int:
        """Tokens in the cache: the newest is only put in when the next is asked for."""
        return self.num_read + max(0, self.num_new - 1)

    @property
    def num_needed(self) -> int:
        """Tokens that the cache may have to hold for it."""
        return self.num_prompt + self._max_new

    @property
    def draw(self) -> Draw:
        """How its next token is drawn."""
        return Draw(self.request.sampling, self.num_prompt + self.num_new)

    def accept(self, token: int, log_prob: float, eos_ids: Collection[int]) -> Event:
        """Take the token that was drawn."""
        self.last_token = token
        self.num_new += 1
        is_eos = token in eos_ids and not self.request.sampling.ignore_eos
        text = "" if is_eos else self._text.push(token)
        is_full = self.num_new >= self._max_new
        if is_eos or (is_full and not self._text.is_stopped):
            text += self._text.finish()
        reason: FinishReason | None = "stop" if is_eos or self._text.is_stopped else "length" if is_full else None
        return self._build_event(token, text, reason, log_prob)

    def cancel(self) -> Event:
        """End it without another token."""
        return self._build_event(None, self._text.finish(), "cancelled", None)

    def fail(self) -> Event:
        """End it where there is no next token."""
        return self._build_event(None, self._text.finish(), "failed", None)

    def _build_event(self, token: int | None, text: str, reason: FinishReason | None, log_prob: float | None) -> Event:
        return Event(self.request.id, token, text, reason, self.num_prompt, self.num_new, log_prob)
