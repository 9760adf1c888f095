"""What the server counts and times, in the text form of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from plait.generate.request import Event

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The counters of one server. A sequence is one choice of one prompt: a request may ask for several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._responses = Counter(
            "plait_http_responses", "Answers by path and status; 499: the client went away", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self._sequences = Counter(
            "plait_sequences", "Sequences that ended, by reason", ["finish_reason"], registry=registry
        )
        self._prompt_tokens = Counter("plait_prompt_tokens", "Tokens read, of prompts", registry=registry)
        self._new_tokens = Counter("plait_generated_tokens", "Tokens generated", registry=registry)
        self._waiting = Gauge("plait_sequences_waiting", "Sequences that wait for a place", registry=registry)
        self._running = Gauge("plait_sequences_running", "Sequences that hold a place", registry=registry)
        self._first_token_s = Histogram(
            "plait_time_to_first_token_seconds", "From the request to the first token",
            buckets=_FIRST_TOKEN_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._token_s = Histogram(
            "plait_time_per_token_seconds", "From a token to the next of its sequence",
            buckets=_TOKEN_BUCKETS_S, registry=registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """What `GET /metrics` answers."""
        return generate_latest(self._registry)

    def count_response(self, path: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(path, str(status)).inc()

    def count_event(self, event: Event, since_s: float, is_first: bool) -> None:
        """Count what a step brought to a sequence, `since_s` after its request or its last token."""
        if event.token is not None:
            self._new_tokens.inc()
            (self._first_token_s if is_first else self._token_s).observe(since_s)
            if is_first:
                self._prompt_tokens.inc(event.num_prompt_tokens)
        if event.finish_reason is not None:
            self.count_end(event.finish_reason)

    def count_end(self, reason: str) -> None:
        """Count a sequence that ended."""
        self._sequences.labels(reason).inc()

    def show_load(self, num_waiting: int, num_running: int) -> None:
        """Say how many sequences wait and run now."""
        self._waiting.set(num_waiting)
        self._running.set(num_running)
