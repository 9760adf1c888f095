"""Answers that are errors, in the form that OpenAI's clients read."""

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """A request that is not answered, and why. Raised on the way to an answer, it becomes the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refuse_for_now(message: str, code: str) -> Refusal:
    """A refusal of what may work later or elsewhere: clients try again by themselves."""
    return Refusal(503, message, kind="server_error", code=code, headers={"Retry-After": "1"})


def fail(message: str) -> Refusal:
    """The answer to a request that was taken in, but could not be finished."""
    return Refusal(500, message, kind="server_error", code="server_failed")


def refuse_length(max_context: int, problem: str, param: str) -> Refusal:
    """The answer to a prompt that is too long for the model."""
    message = f"the context of this model is {max_context} tokens: {problem}"
    return Refusal(400, message, param=param, code="context_length_exceeded")
