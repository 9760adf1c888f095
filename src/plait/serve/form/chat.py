"""Texts and chats as the tokens of a model, by its tokenizer."""

from collections.abc import Sequence
from typing import Any

from plait.serve.form.forms import Message
from plait.serve.form.refusal import Refusal

_ROLES = {"developer": "system"}
"""Roles that templates of open models do not know, by the one that they call it."""


class PromptReader:
    """Reads prompts with a tokenizer of transformers. Several threads may use it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, with those that the tokenizer puts around every text."""
        return self._encode(text, add_special_tokens=True)

    def read_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a chat up to where the model is to answer, by the template of the tokenizer.

        Raises:
            Refusal: there is no template, or it does not take these messages.
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
        return self._encode(text, add_special_tokens=False)

    def show_token(self, token: int) -> str:
        """The text of one token; bytes that are no text by themselves as U+FFFD."""
        text: str = self._tokenizer.decode([token])
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # As a list of texts: for a single one the tokenizer would not let other threads go on meanwhile.
        (tokens,) = self._tokenizer([text], add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return tuple(tokens)


def _build_message(message: Message) -> dict[str, str]:
    built = {"role": _ROLES.get(message.role, message.role), "content": message.content}
    return built if message.name is None else {**built, "name": message.name}
