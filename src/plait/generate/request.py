"""What is asked of a continuous batch, and what it answers; no torch, so that a server can speak of it alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from sys import float_info
from typing import Any, Literal, Self

from plait.errors import ConfigError, describe_nearest

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by less have no room for noise in a float64; nobody can tell the result from that of 0."""

FinishReason = Literal["stop", "length", "cancelled", "failed"]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_filled_tuple(value: object) -> bool:
    return isinstance(value, tuple) and value != ()


def _check_number(name: str, value: object, wanted: str, is_right: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= float_info.max  # type: ignore[arg-type]
    return "" if is_finite and is_right(value) else f"{name} {value!r} is not {wanted}"


def _check_integer(name: str, value: object, wanted: str, least: int | None) -> str:
    is_right = _is_integer(value) and (least is None or value >= least)  # type: ignore[operator]
    return "" if is_right else f"{name} {value!r} is not {wanted if least is None else f'an integer of {wanted}'}"


def _check_bool(name: str, value: object) -> str:
    return "" if isinstance(value, bool) else f"{name} {value!r} is neither true nor false"


def _check_stop(stop: object) -> str:
    is_right = isinstance(stop, tuple) and all(map(_is_text, stop))
    return "" if is_right else f"stop {stop!r} is not a list of texts that are not empty"


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn, and when to stop.

    The logits are divided by `temperature`, then all but the `top_k` largest are dropped, then all but the fewest that
    hold `top_p` of the probability. A token depends on its request alone: on the seed, its position and its logits,
    not on the tp degree nor on what else is in the batch.

    Raises:
        ConfigError: everything wrong with the values at once.
    """

    temperature: float = 0.0
    """0 takes the likeliest token, that of the lowest id if several are alike."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1 keeps all."""
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Texts at whose first appearance the request ends; what is before them is its text."""
    ignore_eos: bool = False
    """Whether to go on after the end-of-sequence token."""

    def __post_init__(self) -> None:
        if problems := [problem for problem in self._list_problems() if problem]:
            raise ConfigError.from_problems("sampling", problems)

    def _list_problems(self) -> list[str]:
        return [
            _check_number(
                "temperature",
                self.temperature,
                f"0 or at least {_LEAST_TEMPERATURE}",
                lambda value: value == 0 or value >= _LEAST_TEMPERATURE,
            ),
            _check_integer("top_k", self.top_k, "at least 0", 0),
            _check_number("top_p", self.top_p, "more than 0 and at most 1", lambda value: 0 < value <= 1),
            _check_integer("seed", self.seed, "an integer", None),
            _check_integer("max_new_tokens", self.max_new_tokens, "at least 1", 1),
            _check_stop(self.stop),
            _check_bool("ignore_eos", self.ignore_eos),
        ]

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Take settings as JSON has them.

        Raises:
            ConfigError: a setting that there is not, or a value that cannot be.
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"sampling: there is no setting {name!r}", hint=describe_nearest(name, known))
        stop = settings.get("stop", ())
        texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else stop
        return cls(**{**settings, "stop": texts})

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, under an id of its own.

    Raises:
        ConfigError: an empty prompt or id, or something that is no token id.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self) -> None:
        if not _is_text(self.id):
            raise ConfigError(f"request: id {self.id!r} is not a text, or an empty one")
        if not _is_filled_tuple(self.prompt):
            raise ConfigError(f"request {self.id}: the prompt has no tokens", hint="give at least one token id")
        bad = next((token for token in self.prompt if not _is_integer(token) or token < 0), None)
        if bad is not None:
            raise ConfigError(f"request {self.id}: {bad!r} in the prompt is no token id")


@dataclass(frozen=True)
class Event:
    """What one step brought to a request: one token, or its end without one."""

    request_id: str
    token: int | None
    """None where a request was cancelled, or has failed."""
    text: str
    """New text that will not change any more; it may be empty for some tokens and then come at once."""
    finish_reason: FinishReason | None
    """`stop`: end-of-sequence token or stop text, `length`: max_new_tokens or end of the context, `cancelled`, or
    `failed`: the model gave logits that are not finite."""
    num_prompt_tokens: int
    num_new_tokens: int
    """So far, this one included."""
    log_prob: float | None = None
    """Of the token, among all tokens, before temperature and the rest."""


@dataclass(frozen=True)
class Capacity:
    """What a model takes: the size of its vocabulary, and the tokens of a prompt with its continuation."""

    vocab_size: int
    max_context: int
    default_new_tokens: int | None = None
    """Of a request that does not say how many it wants; None for all that the context has room for."""

    def check(self, request: Request) -> None:
        """Refuse what the model has no ids or no positions for.

        Raises:
            ConfigError: a token id outside the vocabulary, or a prompt that leaves no room for one new token.
        """
        largest = max(request.prompt)
        if largest >= self.vocab_size:
            raise ConfigError(
                f"request {request.id}: token id {largest} is not in the vocabulary 0:{self.vocab_size}",
                hint="tokenize with the tokenizer of the model",
            )
        if len(request.prompt) >= self.max_context:
            raise ConfigError(
                f"request {request.id}: a prompt of {len(request.prompt)} tokens and one new token do not fit into the "
                f"context of {self.max_context} tokens",
                hint=f"shorten the prompt to at most {self.max_context - 1} tokens",
            )
