"""Texts and chats as the tokens of a model, by its tokenizer."""

from collections.abc import Sequence
from typing import Any

from plait.serve.form.forms import Message
from plait.serve.form.refusal import Refusal, refuse_length

_CHARACTERS_PER_TOKEN = 16
"""More than any text has on average: so much of it, for each token that there is room for, tells if it is too long."""

_ROLES = {"developer": "system"}
"""Roles that templates of open models do not know, by the one that they call it."""


class PromptReader:
    """Reads prompts with a tokenizer of transformers. Several threads may use it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read_text(self, text: str, max_context: int) -> tuple[int, ...]:
        """The tokens of a text, with those that the tokenizer puts around every text.

        Raises:
            Refusal: it is far too long for `max_context`; one that is a little too long is read as any other.
        """
        self._check_length(text, max_context, "prompt")
        return self._encode(text, add_special_tokens=True)

    def read_chat(self, messages: Sequence[Message], max_context: int) -> tuple[int, ...]:
        """The tokens of a chat up to where the model is to answer, by the template of the tokenizer.

        Raises:
            Refusal: there is no template, or it does not take these messages, or they are far too long.
        """
        if not self._tokenizer.chat_template:
            raise Refusal(
                400, "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        listed = [_build_message(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, jinja's errors among others
            raise Refusal(
                400, f"the model's chat template does not take these messages: {error}", param="messages"
            ) from error
        self._check_length(text, max_context, "messages")
        return self._encode(text, add_special_tokens=False)

    def show_token(self, token: int) -> str:
        """The text of one token; bytes that are no text by themselves as U+FFFD."""
        text: str = self._tokenizer.decode([token])
        return text

    def _check_length(self, text: str, max_context: int, param: str) -> None:
        """Refuse by its beginning what would take seconds to read, only to be refused then."""
        beginning = text[: _CHARACTERS_PER_TOKEN * max_context]
        if len(beginning) == len(text):
            return
        num_tokens = len(self._encode(beginning, add_special_tokens=False))
        # The last tokens of the beginning may be others than in the whole text; half of them are not.
        if num_tokens > 2 * max_context:
            raise refuse_length(max_context, f"a prompt of more than {num_tokens // 2} tokens is too long", param)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # As a list of texts: for a single one the tokenizer would not let other threads go on meanwhile.
        (tokens,) = self._tokenizer([text], add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return tuple(tokens)


def _build_message(message: Message) -> dict[str, str]:
    built = {"role": _ROLES.get(message.role, message.role), "content": message.content}
    return built if message.name is None else {**built, "name": message.name}
