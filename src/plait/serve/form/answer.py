"""Answers in OpenAI's forms: whole, and in the chunks of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from plait.generate.request import Event

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class TokenLogProb:
    """One token of an answer, when they are asked for."""

    text: str
    offset: int
    """Characters of the answer before the text that came with it."""
    log_prob: float


@dataclass
class Choice:
    """A sequence as far as it has come."""

    index: int
    text: str = ""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0

    def add(self, event: Event, show_token: Callable[[int], str] | None) -> "Choice":
        """Take in an event; the piece that it adds. With `show_token`, log probabilities are kept."""
        piece = Choice(self.index, event.text, [], event.finish_reason, event.num_prompt_tokens, event.num_new_tokens)
        if show_token is not None and event.token is not None and event.log_prob is not None:
            piece.log_probs.append(TokenLogProb(show_token(event.token), len(self.text), event.log_prob))
        self.text += event.text
        self.log_probs += piece.log_probs
        self.finish_reason = event.finish_reason
        self.num_prompt_tokens, self.num_new_tokens = event.num_prompt_tokens, event.num_new_tokens
        return piece

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say of it."""
        return not self.text and not self.log_probs and self.finish_reason is None


@dataclass(frozen=True)
class Answer(ABC):
    """One answer: what its whole and its chunks have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    num_choices: int
    """Of each prompt."""
    show_token: Callable[[int], str] | None
    """The text of a token where log probabilities are asked for, else None."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def build_whole(self, choices: Sequence[Choice]) -> JsonObject:
        """The answer at once."""
        return {
            **self._build_head(self.kind),
            "choices": [self._build_choice(choice) for choice in choices],
            "usage": self.build_usage(choices),
        }

    def build_chunk(self, piece: Choice, includes_usage: bool) -> JsonObject:
        """A piece of a stream; where the usage is to come at the end, each piece says that it has none."""
        chunk = {**self._build_head(self.chunk_kind), "choices": [self._build_piece(piece)]}
        return {**chunk, "usage": None} if includes_usage else chunk

    def build_usage_chunk(self, choices: Sequence[Choice]) -> JsonObject:
        """The last piece of a stream, where it is asked for."""
        return {**self._build_head(self.chunk_kind), "choices": [], "usage": self.build_usage(choices)}

    def build_usage(self, choices: Sequence[Choice]) -> JsonObject:
        """Tokens of the prompts, each prompt once, and of all choices."""
        num_prompt = sum(choice.num_prompt_tokens for choice in choices[:: self.num_choices])
        num_new = sum(choice.num_new_tokens for choice in choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def list_opening(self, indices: Iterable[int], includes_usage: bool) -> list[JsonObject]:
        """Chunks before the first token."""
        return []

    def _build_head(self, kind: str) -> JsonObject:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _build_choice(self, choice: Choice) -> JsonObject: ...

    @abstractmethod
    def _build_piece(self, piece: Choice) -> JsonObject: ...


class CompletionAnswer(Answer):
    """Of `POST /v1/completions`."""

    kind = chunk_kind = "text_completion"

    def _build_choice(self, choice: Choice) -> JsonObject:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._build_log_probs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _build_piece(self, piece: Choice) -> JsonObject:
        return self._build_choice(piece)

    def _build_log_probs(self, choice: Choice) -> JsonObject | None:
        if self.show_token is None:
            return None
        return {
            "tokens": [each.text for each in choice.log_probs],
            "token_logprobs": [each.log_prob for each in choice.log_probs],
            "text_offset": [each.offset for each in choice.log_probs],
            "top_logprobs": None,
        }


class ChatAnswer(Answer):
    """Of `POST /v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def list_opening(self, indices: Iterable[int], includes_usage: bool) -> list[JsonObject]:
        """A chunk for each choice that says who speaks."""
        opening = [self.build_chunk(Choice(index), includes_usage) for index in indices]
        for chunk in opening:
            chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return opening

    def _build_choice(self, choice: Choice) -> JsonObject:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._build_log_probs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _build_piece(self, piece: Choice) -> JsonObject:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._build_log_probs(piece),
            "finish_reason": piece.finish_reason,
        }

    def _build_log_probs(self, choice: Choice) -> JsonObject | None:
        if self.show_token is None:
            return None
        listed = [
            {"token": each.text, "logprob": each.log_prob, "bytes": _list_bytes(each.text), "top_logprobs": []}
            for each in choice.log_probs
        ]
        return {"content": listed, "refusal": None}


def _list_bytes(text: str) -> list[int] | None:
    """None for a token that is a part of a character, whose bytes its text does not tell."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
