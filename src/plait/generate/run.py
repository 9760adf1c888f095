"""A set of requests from the first step to the last, on every rank; what `plait generate` does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.errors import ConfigError
from plait.generate.batch import ContinuousBatch
from plait.generate.request import Event, FinishReason, Request


@dataclass
class Answer:
    """What became of one request."""

    num_prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Take what a step brought."""
        self.num_prompt_tokens = event.num_prompt_tokens
        if event.token is not None and event.log_prob is not None:
            self.tokens.append(event.token)
            self.log_probs.append(event.log_prob)
        self.text += event.text
        self.finish_reason = event.finish_reason


@dataclass(frozen=True)
class Summary:
    """What a run took."""

    num_prompts: int
    num_prompt_tokens: int
    num_new_tokens: int
    elapsed_s: float
    cache_bytes_per_token: int
    """On each rank."""

    @property
    def new_tokens_per_s(self) -> float:
        """Of all requests together, the reading of their prompts included."""
        return self.num_new_tokens / self.elapsed_s if self.elapsed_s else 0.0


def run_requests(
    batch: ContinuousBatch, requests: Sequence[Request], tell: Callable[[Event], None]
) -> tuple[dict[str, Answer], Summary]:
    """Answer all requests, as many together as the batch takes; `tell` hears every event as it comes.

    Raises:
        ConfigError: on every rank: logits that are not finite.
    """
    answers = {request.id: Answer() for request in requests}
    start = time.perf_counter()
    arrivals, bytes_per_token = requests, 0
    while arrivals or batch.num_running or batch.num_waiting:
        events = batch.step(arrivals)
        arrivals = ()
        bytes_per_token = batch.cache.bytes_per_token or bytes_per_token
        for event in events:
            if event.finish_reason == "failed":
                raise ConfigError(
                    f"request {event.request_id}: the model gave logits that are not finite after "
                    f"{event.num_new_tokens} new tokens",
                    hint="load it in float32 or bfloat16, or check its weights",
                )
            answers[event.request_id].add(event)
            tell(event)
    elapsed_s = time.perf_counter() - start
    done = answers.values()
    num_read, num_new = sum(each.num_prompt_tokens for each in done), sum(len(each.tokens) for each in done)
    return answers, Summary(len(requests), num_read, num_new, elapsed_s, bytes_per_token)
