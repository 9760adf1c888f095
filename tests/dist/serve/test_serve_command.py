"""`plait serve` as processes, with a small random model and the client that its users have."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.support.served_model import CONTEXT, PATIENCE_S, ServeProcess, run_serve, save_tiny_model

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)  # each test that starts a server imports torch three times

KEY = "secret-key"
NUM_CLIENTS = 32
PROMPTS = ["abcdefghijklmnopqrstuvwxyz"[: 1 + i % 26] * (1 + i % 3) + str(i) for i in range(NUM_CLIENTS)]
LENGTHS = [1 + (i * 11) % 40 for i in range(NUM_CLIENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module", params=["1", "2"], ids=["tp=1", "tp=2"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServeProcess]:
    with ServeProcess(folder, "--tp", request.param, "--max-batch", "8", key=KEY) as server:
        yield server


def open_client(server: ServeProcess, key: str = KEY) -> OpenAI:
    return OpenAI(base_url=server.api, api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def client(server: ServeProcess) -> Iterator[OpenAI]:
    with open_client(server) as client:
        yield client


def complete(client: OpenAI, prompt: str, length: int, **values: Any) -> str:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=length, temperature=0, **values)
    return answer.choices[0].text


def read_metrics(server: ServeProcess) -> dict[tuple[str, ...], float]:
    text = httpx2.get(server.api.removesuffix("/v1") + "/metrics", timeout=PATIENCE_S).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until_idle(server: ServeProcess) -> dict[tuple[str, ...], float]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        metrics = read_metrics(server)
        if metrics["plait_sequences_waiting",] == metrics["plait_sequences_running",] == 0:
            return metrics
        time.sleep(0.1)
    raise AssertionError(metrics)


async def ask(client: AsyncOpenAI, index: int) -> str:
    """Half of the clients stream."""
    prompt, length = PROMPTS[index], LENGTHS[index]
    if index % 2:
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=length, temperature=0)
        return answer.choices[0].text
    stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=length, temperature=0, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def leave(client: AsyncOpenAI, index: int) -> None:
    """A client that goes away after its second chunk."""
    stream = await client.completions.create(
        model="tiny", prompt=f"gone {index}", max_tokens=100, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    await anext(stream)
    await anext(stream)
    await stream.close()


async def ask_all(server: ServeProcess) -> list[str]:
    async with AsyncOpenAI(base_url=server.api, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        leaving = [asyncio.ensure_future(leave(client, index)) for index in range(4)]
        texts = await asyncio.gather(*(ask(client, index) for index in range(NUM_CLIENTS)))
        await asyncio.gather(*leaving)
        return texts


def test_32_clients_at_once_get_what_each_gets_alone_and_the_metrics_add_up(
    server: ServeProcess, client: OpenAI
) -> None:
    alone = [complete(client, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    assert len(set(alone)) > NUM_CLIENTS // 2, "a model whose answers are alike shows nothing"
    before = read_metrics(server)
    assert asyncio.run(ask_all(server)) == alone
    after = wait_until_idle(server)

    def risen(*key: str) -> float:
        return after[key] - before.get(key, 0)

    ended = sum(risen(*key) for key in after if key[0] == "plait_sequences_total")
    assert ended == NUM_CLIENTS + 4
    assert risen("plait_sequences_total", "cancelled") <= 4
    assert risen("plait_http_responses_total", "/v1/completions", "200") == NUM_CLIENTS + 4
    assert risen("plait_time_to_first_token_seconds_count") == NUM_CLIENTS + 4
    assert risen("plait_prompt_tokens_total") == sum(map(len, PROMPTS)) + 4 * len("gone 0")
    assert risen("plait_generated_tokens_total") == (
        risen("plait_time_to_first_token_seconds_count") + risen("plait_time_per_token_seconds_count")
    )


def test_a_chat_is_answered_whole_and_as_a_stream(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0,
    }  # fmt: skip
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == complete(client, "<user>hello<assistant>", 12)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert last.usage == answer.usage


def test_a_seed_gives_the_same_again_and_choices_those_of_the_seeds_that_follow(client: OpenAI) -> None:
    def draw(**values: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="hello", max_tokens=12, **values)
        return [choice.text for choice in answer.choices]

    several = draw(seed=3, n=3)
    assert len(set(several)) > 1
    assert several == [*draw(seed=3), *draw(seed=4), *draw(seed=5)]


def test_the_log_probability_of_a_token_is_given(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=4, temperature=0, logprobs=0)
    log_probs = answer.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.token_logprobs is not None
    assert len(log_probs.token_logprobs) == 4
    assert all(value <= 0 for value in log_probs.token_logprobs)


def test_what_cannot_be_answered_is_refused_and_the_server_goes_on(server: ServeProcess, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT} tokens: a prompt of 200 tokens and max_tokens 5"):
        complete(client, "x" * 200, 5)
    with pytest.raises(openai.BadRequestError, match="token id 9999 is not in the vocabulary"):
        client.completions.create(model="tiny", prompt=[9999])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="large", prompt="x")
    with pytest.raises(openai.AuthenticationError), open_client(server, "wrong") as stranger:
        stranger.models.list()
    response = httpx2.post(
        f"{server.api}/completions", content=b"{'model'", timeout=PATIENCE_S,
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )  # fmt: skip
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert complete(client, "x" * (CONTEXT - 5), 5) == complete(client, "x" * (CONTEXT - 5), 5)


def test_extreme_settings_harm_nobody(client: OpenAI) -> None:
    alone = complete(client, "hello", 5)
    for values in ({"temperature": 1e-6}, {"temperature": 1e30}, {"top_p": 1e-30}, {"extra_body": {"top_k": 10**9}}):
        asked: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 5, **values}
        assert client.completions.create(**asked).choices[0].finish_reason in ("length", "stop")
    assert complete(client, "hello", 5) == alone


@pytest.mark.parametrize(
    ("tp", "whole_terminal"), [("2", False), ("1", True)], ids=["SIGTERM to the command", "Ctrl-C in a terminal"]
)
def test_a_stopped_server_finishes_what_is_under_way(folder: Path, tp: str, whole_terminal: bool) -> None:
    with ServeProcess(folder, "--tp", tp) as server, open_client(server) as client:
        wanted = complete(client, "hello", 100, extra_body={"ignore_eos": True})
        stream = client.completions.create(
            model="tiny", prompt="hello", max_tokens=100, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text = next(stream).choices[0].text
        if whole_terminal:
            os.killpg(server.process.pid, signal.SIGINT)
        else:
            server.process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == wanted
        assert server.wait() == 0
        assert "error: " not in server.stderr


def test_a_server_without_grace_cancels_what_is_under_way(folder: Path) -> None:
    with ServeProcess(folder, "--tp", "2", "--grace", "0", "--max-batch", "1") as server, open_client(server) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt=text, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            for text in ("running", "waiting")
        ]
        next(streams[0])
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down: the request was not finished"):
            list(streams[1])
        assert server.wait() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_server_with_one_error(folder: Path, rank: int) -> None:
    with ServeProcess(folder, "--tp", "2", "--max-batch", "1") as server, open_client(server) as client:
        ended: list[Exception] = []

        def ask_whole() -> None:
            try:
                complete(client, "whole", 120, extra_body={"ignore_eos": True})
            except openai.OpenAIError as error:
                ended.append(error)

        stream = client.completions.create(
            model="tiny", prompt="hello", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        whole = threading.Thread(target=ask_whole)
        whole.start()
        os.kill(server.rank_pids()[rank], signal.SIGKILL)
        # Rank 0 has the connections: with it they break.
        kind = openai.APIConnectionError if rank == 0 else openai.APIError
        with pytest.raises((kind, httpx2.HTTPError)):
            list(stream)
        whole.join(PATIENCE_S)
        assert len(ended) == 1
        assert server.wait() == 3
        assert server.stderr.count("error: ") == 1
        assert f"error: rank {rank} (tp={rank}) died: killed by SIGKILL" in server.stderr


def test_a_rank_that_dies_while_nothing_is_asked_ends_the_server_too(folder: Path) -> None:
    with ServeProcess(folder, "--tp", "2") as server:
        os.kill(server.rank_pids()[1], signal.SIGKILL)
        assert server.wait() == 3
        assert server.stderr.count("error: ") == 1


def test_a_port_in_use_is_said_before_any_rank_starts(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = run_serve([str(folder), "--tp", "2", "--port", str(port)])
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use\n\nhint: choose another with --port")
