"""The bodies of requests: what OpenAI's API takes, as far as it can be answered here; the rest is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from plait.serve.form.refusal import Refusal

MAX_CHOICES = 128
MAX_STOP = 16
MAX_STOP_LENGTH = 1000
"""Every token is compared with the beginnings of all stop texts."""

_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "parallel_tool_calls",
})  # fmt: skip
"""What changes nothing in the answer of a server like this one."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""What is not done here, with the values by which it is not asked for either."""

_MESSAGE_NEUTRAL = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls"})
"""What an answer has beside its content when a client sends it back."""


def _list_stop(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _list_prompts(prompt: object) -> object:
    """One prompt is a list of one; a prompt is a text, or a list of token ids."""
    listed = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    is_right = all(
        isinstance(each, str)
        or (isinstance(each, list) and each and all(type(token) is int and token >= 0 for token in each))
        for each in listed
    )
    if not is_right:
        raise ValueError("a prompt is a string, or a list of token ids, or a list of either")
    return listed


def _join_parts(content: object) -> object:
    """The text of a message that comes in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'parts of type "text" are taken, not {kind!r}' if kind else "a part is no object")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_alternatives(count: int) -> int:
    if count != 0:
        raise ValueError(f"{count} alternatives of each token are not given here, only the log probability of each: 0")
    return count


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Form):
    """How a stream is sent."""

    include_usage: bool = False
    """Whether the last chunk before the end has the usage."""
    include_obfuscation: bool = False
    """Accepted, as clients send it; nothing is obfuscated."""


class GenerationForm(_Form):
    """What both forms have. None stands for the default everywhere, as clients send it so."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """An extension: 0 or -1 keeps all."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(max_length=MAX_STOP),
            BeforeValidator(_list_stop),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    """An extension: whether to go on after the end-of-sequence token."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """None for all that the context has room for."""
        return self.max_tokens

    @property
    def has_log_probs(self) -> bool:
        """Whether they are asked for."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionForm(GenerationForm):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_list_prompts)]
    logprobs: Annotated[int, AfterValidator(_check_alternatives)] | None = None
    """0: those of the tokens themselves."""

    @property
    def max_new_tokens(self) -> int | None:
        """As OpenAI's, which has 16 where nothing is said."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def has_log_probs(self) -> bool:
        """Whether they are asked for."""
        return self.logprobs is not None


class Message(_Form):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_parts)]
    name: str | None = None


class ChatForm(GenerationForm):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """None for all that the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def has_log_probs(self) -> bool:
        """Whether they are asked for."""
        return bool(self.logprobs)


FormT = TypeVar("FormT", bound=GenerationForm)


def read_form(kind: type[FormT], body: bytes) -> FormT:
    """Read the body of a request.

    Raises:
        Refusal: it is no JSON, or no such form, or asks for what is not done here.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise Refusal(400, "the body is JSON, but no object", code="invalid_json")
    try:
        form = kind.model_validate(_without_neutral(data, kind))
    except ValidationError as error:
        raise _describe(error) from error
    if form.stream_options is not None and not form.stream:
        raise Refusal(400, "stream_options is for stream = true", param="stream_options")
    return form


def _without_neutral(data: dict[str, Any], kind: type[GenerationForm]) -> dict[str, Any]:
    """What is left for the form, if nothing is asked for that is not done here."""
    left = {}
    for name, value in data.items():
        if name in kind.model_fields:
            left[name] = [_plain(each) for each in value] if name == "messages" and isinstance(value, list) else value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise Refusal(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        elif name not in _IGNORED:
            raise Refusal(400, f"there is no parameter {name!r}", param=name, code="unknown_parameter")
    return left


def _plain(message: object) -> object:
    """A message without what is empty in it."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value not in (None, []) or name not in _MESSAGE_NEUTRAL}


def _describe(error: ValidationError) -> Refusal:
    """All that is wrong with a form, and where."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    listed = dict.fromkeys(f"{_path(each['loc'])}: {_say(each['msg'])}" for each in found)
    return Refusal(400, "; ".join(listed), param=str(found[0]["loc"][0]))


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _say(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
