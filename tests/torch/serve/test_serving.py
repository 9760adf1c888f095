"""A server in this process, with the client that its users have; what generates is the stand-in."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from plait.generate.request import Capacity
from plait.serve.http import stream
from tests.support.serving import KEY, MODEL, RunningServer, StandInBatch, continue_text, run_server

PATIENCE_S = 60


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with run_server(StandInBatch()) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with open_client(server) as client:
        yield client


def open_client(server: RunningServer, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=server.api, api_key=key, max_retries=0, timeout=PATIENCE_S)


def address_of(server: RunningServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_metrics(server: RunningServer) -> dict[tuple[str, ...], float]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def gated_batch(**settings: Any) -> tuple[StandInBatch, threading.Semaphore]:
    """A batch that takes one step for each release."""
    gate = threading.Semaphore(0)

    def pace() -> None:
        assert gate.acquire(timeout=PATIENCE_S)

    return StandInBatch(pace=pace, **settings), gate


def test_a_completion_is_that_of_its_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=5)
    assert answer.choices[0].text == continue_text("hello", 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.id.startswith("cmpl-")


def test_prompts_and_choices_keep_their_order(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "bb", "ccc"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(6))
    wanted = [continue_text(prompt, 4) for prompt in ("a", "a", "bb", "bb", "ccc", "ccc")]
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 24)


def test_a_prompt_may_be_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=list(b"hello"), max_tokens=5)
    assert answer.choices[0].text == continue_text("hello", 5)


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="hello", max_tokens=9, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == continue_text("hello", 9)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_is_by_the_template_and_ends_at_the_end_of_the_context(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    prompt = "<user>hi<assistant>"
    assert answer.choices[0].message.content == continue_text(prompt, 512 - len(prompt))
    assert answer.choices[0].message.role == "assistant"


def test_a_chat_stream_ends_with_the_usage_where_it_is_asked_for(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}],
        n=2, max_completion_tokens=3, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    prompt = "<system>be<user>hi<assistant>"
    assert texts == dict.fromkeys((0, 1), continue_text(prompt, 3))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 6)


def test_a_stop_text_ends_an_answer(client: OpenAI) -> None:
    text = continue_text("hello", 9)
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, stop=text[3])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(text[3])], "stop")


def test_log_probabilities_come_with_their_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=3, logprobs=0)
    log_probs = answer.choices[0].logprobs
    assert log_probs is not None
    assert (log_probs.tokens, log_probs.token_logprobs) == (list(continue_text("hello", 3)), [-0.5] * 3)
    talk = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True
    )
    assert talk.choices[0].logprobs is not None
    assert talk.choices[0].logprobs.content is not None
    assert [each.logprob for each in talk.choices[0].logprobs.content] == [-0.5] * 3


def test_32_clients_at_once_get_what_each_gets_alone() -> None:
    prompts = ["x" * (1 + i * 7 % 90) + str(i) for i in range(32)]

    async def ask(client: AsyncOpenAI, index: int) -> str:
        if index % 2:
            answer = await client.completions.create(model=MODEL, prompt=prompts[index], max_tokens=1 + index)
            return answer.choices[0].text
        stream = await client.completions.create(model=MODEL, prompt=prompts[index], max_tokens=1 + index, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(server: RunningServer) -> list[str]:
        async with AsyncOpenAI(base_url=server.api, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(32)))

    with run_server(StandInBatch()) as server:
        texts = asyncio.run(ask_all(server))
        assert texts == [continue_text(prompt, 1 + index) for index, prompt in enumerate(prompts)]
        metrics = read_metrics(server)
    assert metrics["plait_sequences_total", "length"] == 32
    assert metrics["plait_prompt_tokens_total",] == sum(map(len, prompts))
    assert metrics["plait_generated_tokens_total",] == sum(range(1, 33))
    assert metrics["plait_http_responses_total", "/v1/completions", "200"] == 32
    assert metrics["plait_time_to_first_token_seconds_count",] == 32
    assert metrics["plait_time_per_token_seconds_count",] == sum(range(32))
    assert (metrics["plait_sequences_waiting",], metrics["plait_sequences_running",]) == (0, 0)


def ask_in_thread(client: OpenAI, **values: Any) -> threading.Thread:
    thread = threading.Thread(target=client.completions.create, kwargs={"model": MODEL, **values})
    thread.start()
    return thread


def release_until_done(gate: threading.Semaphore, *threads: threading.Thread) -> None:
    while any(thread.is_alive() for thread in threads):
        gate.release()
        time.sleep(0.01)


def test_who_comes_first_is_begun_first() -> None:
    batch, gate = gated_batch(max_requests=1)
    with run_server(batch) as server, open_client(server) as client:
        asking: list[threading.Thread] = []
        for index in range(4):
            asking.append(ask_in_thread(client, prompt=str(index), max_tokens=2))
            wait_for(lambda: server.desk.num_in_flight == len(asking))
        release_until_done(gate, *asking)
    assert batch.started == ["0", "1", "2", "3"]


def test_a_client_that_leaves_in_mid_stream_frees_its_place_for_another() -> None:
    batch, gate = gated_batch(max_requests=1)
    with run_server(batch) as server, open_client(server) as client:
        stream = client.completions.create(model=MODEL, prompt="long", max_tokens=500, stream=True)
        gate.release()
        assert next(stream).choices[0].text == continue_text("long", 1)
        stream.close()
        release_until_done(gate, ask_in_thread(client, prompt="short", max_tokens=2))
        metrics = read_metrics(server)
    assert metrics["plait_sequences_total", "cancelled"] == 1
    assert metrics["plait_sequences_total", "length"] == 1


def test_a_client_that_does_not_wait_for_a_whole_answer_frees_its_place_too() -> None:
    batch, gate = gated_batch(max_requests=1)
    with run_server(batch) as server, open_client(server) as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(model=MODEL, prompt="long", max_tokens=500)
        release_until_done(gate, ask_in_thread(client, prompt="short", max_tokens=2))
        metrics = read_metrics(server)
    assert metrics["plait_sequences_total", "cancelled"] == 1
    assert metrics["plait_http_responses_total", "/v1/completions", "499"] == 1


@contextmanager
def silent_stream(server: RunningServer, num_tokens: int) -> Iterator[None]:
    """A client that asks for a stream and reads nothing of it."""
    body = json.dumps({"model": MODEL, "prompt": "long", "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(address_of(server))
        silent.sendall(head.encode() + body)
        wait_for(lambda: server.batch.num_running == 1)
        yield


def test_a_client_that_reads_nothing_keeps_nobody_waiting() -> None:
    """Its connection is full after some chunks; the batch goes on, and others are answered."""
    batch = StandInBatch(max_requests=2, capacity=Capacity(256, 10_000))
    with run_server(batch) as server, open_client(server) as client, silent_stream(server, 5_000):
        answer = client.completions.create(model=MODEL, prompt="short", max_tokens=300)
        assert answer.choices[0].text == continue_text("short", 300)
        wait_for(lambda: server.desk.num_in_flight == 0)  # the silent one's too
        metrics = read_metrics(server)
    assert metrics["plait_sequences_total", "length"] == 2


def test_a_client_that_takes_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PATIENCE_S", 0.2)
    batch = StandInBatch(capacity=Capacity(256, 10_000_000))
    with run_server(batch) as server, silent_stream(server, 9_000_000):
        wait_for(lambda: server.desk.num_in_flight == 0)
        metrics = read_metrics(server)
    assert metrics["plait_sequences_total", "cancelled"] == 1


def test_a_full_queue_is_said_and_others_go_on() -> None:
    batch, gate = gated_batch(max_requests=1)
    with run_server(batch, max_queue=1) as server, open_client(server) as client:
        asking: list[threading.Thread] = []
        for index in range(2):
            asking.append(ask_in_thread(client, prompt=str(index), max_tokens=2))
            wait_for(lambda: server.desk.num_in_flight == len(asking))
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
        release_until_done(gate, *asking)
    assert batch.started == ["0", "1"]


def test_what_is_under_way_finishes_after_a_stop_and_nothing_new_comes_in() -> None:
    batch, gate = gated_batch()
    with run_server(batch) as server, open_client(server) as client:
        stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, stream=True)
        gate.release()
        texts = [next(stream).choices[0].text]
        server.stop.set()
        gate.release()
        wait_for(lambda: server.desk.state == "stopping")
        wait_for(lambda: not is_listening(server))
        for _ in range(20):
            gate.release()
        texts += [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == continue_text("hello", 20)
        server.rounds.join(PATIENCE_S)
        assert not server.rounds.is_alive()
    assert server.failures == []


def is_listening(server: RunningServer) -> bool:
    try:
        socket.create_connection(address_of(server), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def test_what_does_not_finish_in_the_grace_time_is_told_so() -> None:
    batch, gate = gated_batch()
    with run_server(batch, grace_s=0.0) as server, open_client(server) as client:
        stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=500, stream=True)
        errors: list[openai.OpenAIError] = []

        def ask_whole() -> None:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=MODEL, prompt="whole", max_tokens=500)
            errors.append(caught.value)

        whole = threading.Thread(target=ask_whole)
        whole.start()
        wait_for(lambda: server.desk.num_in_flight == 2)
        server.stop.set()
        for _ in range(3):
            gate.release()
        with pytest.raises(openai.APIError, match="the server is shutting down: the request was not finished"):
            list(stream)
        whole.join(PATIENCE_S)
        (error,) = errors
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code) == (503, "stopping")
    assert server.failures == []


def test_a_batch_that_fails_is_an_error_for_all_in_flight_and_for_all_that_come() -> None:
    calls = iter(range(3))

    def pace() -> None:
        if next(calls) == 2:
            raise RuntimeError("out of memory")

    with run_server(StandInBatch(pace=pace)) as server, open_client(server) as client:
        with pytest.raises(openai.APIError, match="the server failed before the request was finished"):
            list(client.completions.create(model=MODEL, prompt="hello", max_tokens=20, stream=True))
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="hello")
        assert (caught.value.status_code, caught.value.code) == (503, "failed")
    assert [str(error) for error in server.failures] == ["out of memory"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"prompt": "x" * 600}, openai.BadRequestError),
        ({"model": "gpt"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"echo": True}, openai.BadRequestError),
        ({"prompt": "x" * 3_000_000}, openai.APIStatusError),
    ],
)
def test_clients_raise_what_they_should(client: OpenAI, values: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "p", **values})
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.body is not None
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(server: RunningServer) -> None:
    with open_client(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_garbage_on_the_wire_harms_nobody(server: RunningServer, client: OpenAI) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection(address_of(server), timeout=PATIENCE_S) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
    assert answer.choices[0].text == continue_text("hello", 2)


def test_a_connection_serves_one_request_after_another(server: RunningServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for body in ("{", json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3})):
        connection.request("POST", "/v1/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
    assert answer["choices"][0]["text"] == continue_text("hello", 3)
    connection.close()
