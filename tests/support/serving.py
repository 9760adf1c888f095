"""A batch and a tokenizer that need no model, and a server around them in threads of this process."""

import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from plait.generate.request import Capacity, Event, Request
from plait.serve.desk import Desk
from plait.serve.form.chat import PromptReader
from plait.serve.http.address import listen, url_of
from plait.serve.http.app import Service, build_app
from plait.serve.http.thread import HttpThread
from plait.serve.metrics import Metrics

MODEL = "stand-in"
KEY = "secret-key"


def continue_text(prompt: str, num_tokens: int) -> str:
    """What the stand-in answers: letters that depend on all of the prompt."""
    return "".join(_letter(prompt.encode(), index) for index in range(num_tokens))


def _letter(prompt: bytes, index: int) -> str:
    return chr(97 + (sum(prompt) + index * (len(prompt) + 1)) % 26)


class ByteTokenizer:
    """A token is a byte, as far as `PromptReader` asks a tokenizer of transformers."""

    chat_template: str | None = "{messages}"

    def __call__(self, texts: list[str], *, add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        if messages[-1]["role"] != "user":
            raise ValueError("the last message is not the user's")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@dataclass
class StandInBatch:
    """Answers by `continue_text`, a letter a step; `pace` is called in each step that does something."""

    max_requests: int = 4
    capacity: Capacity = field(default_factory=lambda: Capacity(256, 512))
    pace: Callable[[], None] = lambda: None
    waiting: list[Request] = field(default_factory=list)
    running: dict[str, tuple[Request, int]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    """Prompts, in the order in which they got a place."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def step(self, arrivals: Sequence[Request] = (), cancelled: Collection[str] = ()) -> list[Event]:
        self.waiting += arrivals
        events = [self._cancel(request_id) for request_id in cancelled if self._is_known(request_id)]
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting.pop(0)
            self.started.append(bytes(request.prompt).decode())
            self.running[request.id] = (request, 0)
        if self.running:
            self.pace()
        return events + [self._bring_forward(*each) for each in list(self.running.values())]

    def _is_known(self, request_id: str) -> bool:
        return request_id in self.running or any(request.id == request_id for request in self.waiting)

    def _cancel(self, request_id: str) -> Event:
        request, num_new = self.running.pop(request_id, (None, 0))
        self.waiting = [each for each in self.waiting if each.id != request_id]
        return Event(request_id, None, "", "cancelled", len(request.prompt) if request else 0, num_new)

    def _bring_forward(self, request: Request, num_done: int) -> Event:
        letter = _letter(bytes(request.prompt), num_done)
        is_stopped = letter in request.sampling.stop
        is_last = num_done + 1 == request.sampling.max_new_tokens
        self.running[request.id] = (request, num_done + 1)
        if is_stopped or is_last:
            del self.running[request.id]
        reason = "stop" if is_stopped else "length" if is_last else None
        text = "" if is_stopped else letter
        return Event(request.id, ord(letter), text, reason, len(request.prompt), num_done + 1, -0.5)  # type: ignore[arg-type]


@dataclass
class RunningServer:
    """A server in this process."""

    url: str
    batch: StandInBatch
    desk: Desk
    stop: threading.Event
    rounds: threading.Thread
    failures: list[BaseException]

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def run_server(
    batch: StandInBatch, *, max_queue: int = 64, grace_s: float = 30.0, api_key: str | None = KEY, is_open: bool = True
) -> Iterator[RunningServer]:
    """A server around a batch: HTTP in one thread, rounds in another; both have ended after the block."""
    from plait.serve.rounds import Leader, make_rounds
    from tests.support.lone_mesh import build_lone_mesh

    metrics = Metrics()
    desk = Desk(metrics, batch.max_requests + max_queue)
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections are full when little is unread
    url = url_of(listener)
    failures: list[BaseException] = []
    stop = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        service = Service(MODEL, desk, PromptReader(ByteTokenizer()), metrics, threads, api_key)
        http = HttpThread(build_app(service), listener, grace_s, desk.lose)
        leader = Leader(desk, batch, metrics, grace_s, stop.is_set, http.stop_accepting)

        def make() -> None:
            try:
                make_rounds(batch, leader, build_lone_mesh(1))
            except BaseException as error:
                failures.append(error)
                desk.fail()

        rounds = threading.Thread(target=make)
        http.start()
        if is_open:
            desk.open(batch.capacity)
        rounds.start()
        try:
            yield RunningServer(url, batch, desk, stop, rounds, failures)
        finally:
            stop.set()
            desk.wake()
            rounds.join()
            http.close(10.0)
