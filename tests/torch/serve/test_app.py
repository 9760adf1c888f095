"""The application alone, without a socket; what generates is the stand-in of `tests.support.serving`."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from plait.serve.desk import Desk
from plait.serve.form.chat import PromptReader
from plait.serve.http import body
from plait.serve.http.app import Service, build_app
from plait.serve.metrics import Metrics
from tests.support.serving import KEY, MODEL, ByteTokenizer, StandInBatch

PROMPT = {"model": MODEL, "prompt": "p", "max_tokens": 2}
ASK = {"Authorization": f"Bearer {KEY}"}


class Site:
    """The application, its desk, and a client with the key."""

    def __init__(self, threads: ThreadPoolExecutor, *, is_logged: bool = False) -> None:
        metrics = Metrics()
        self.desk = Desk(metrics, 4)
        self.tokenizer = ByteTokenizer()
        service = Service(MODEL, self.desk, PromptReader(self.tokenizer), metrics, threads, KEY, is_logged)
        self.client = TestClient(build_app(service), raise_server_exceptions=False, headers=ASK)

    def open(self) -> None:
        self.desk.open(StandInBatch().capacity)


@pytest.fixture
def site() -> Iterator[Site]:
    with ThreadPoolExecutor(1) as threads:
        site = Site(threads)
        with site.client:
            yield site


@pytest.fixture
def client(site: Site) -> TestClient:
    site.open()
    return site.client


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which is in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_health_follows_the_model_and_life_does_not(site: Site) -> None:
    def ask(path: str) -> tuple[int, Any]:
        response = site.client.get(path)
        return response.status_code, response.json()["status"]

    assert (ask("/livez"), ask("/health")) == ((200, "alive"), (503, "loading"))
    site.open()
    assert (ask("/livez"), ask("/health")) == ((200, "alive"), (200, "ready"))
    site.desk.stop()
    assert (ask("/livez"), ask("/health")) == ((200, "alive"), (503, "stopping"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nothing_is_generated_before_the_model_is_up_nor_when_it_ends(site: Site, path: str) -> None:
    error = error_of(site.client.post(path, json=PROMPT), 503)
    assert (error["code"], error["message"]) == ("loading", "the model is being loaded")
    site.open()
    site.desk.stop()
    response = site.client.post(path, json=PROMPT)
    assert error_of(response, 503)["code"] == "stopping"
    assert response.headers["retry-after"] == "1"


def test_models_are_listed_with_their_context(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 512)
    assert client.get(f"/v1/models/{MODEL}").json() == model
    assert error_of(client.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("given", ["", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer caf\u00e9"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_wrong_key_is_refused_before_anything_is_read(client: TestClient, given: str, path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    response = client.request(method, path, content=b"{", headers={"Authorization": given.encode("latin-1")})
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/livez", "/metrics"])
def test_what_watches_a_server_needs_no_key(client: TestClient, path: str) -> None:
    assert client.get(path, headers={"Authorization": ""}).status_code == 200


def test_an_unknown_path_and_a_wrong_method_are_errors_in_openais_form(client: TestClient) -> None:
    assert error_of(client.get("/v2/models"), 404)["message"] == "GET /v2/models: not found"
    response = client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "invalid_json"), (b"{", "invalid_json"), (b"[1]", "invalid_json"), (b"\xff", "invalid_json")],
)
def test_a_malformed_body_is_refused(client: TestClient, content: bytes, code: str) -> None:
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["code"] == code


def test_a_body_that_is_not_declared_as_json_is_refused(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", content=json.dumps(PROMPT)), 415)
    assert "Content-Type: application/json" in error["message"]
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=b"{", headers=headers).status_code == 400


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_is_too_large_is_refused(client: TestClient, is_declared: bool) -> None:
    text = json.dumps({**PROMPT, "prompt": "x" * body.MAX_BYTES}).encode()
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/completions", content=text if is_declared else iter([text]), headers=headers)
    assert error_of(response, 413)["code"] == "too_large"


def test_another_model_is_not_found(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={**PROMPT, "model": "gpt"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == f"there is no model 'gpt': this server has '{MODEL}'"


def test_a_prompt_longer_than_the_context_is_refused_with_the_values(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={**PROMPT, "prompt": "x" * 511}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "the context of this model is 512 tokens: a prompt of 511 tokens and max_tokens 2 are more"
    )
    error = error_of(client.post("/v1/completions", json={**PROMPT, "prompt": "x" * 100_000}), 400)
    assert error["message"] == "the context of this model is 512 tokens: a prompt of more than 4096 tokens is too long"
    messages = [{"role": "user", "content": "x" * 600}]
    error = error_of(client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "leaves no room for an answer" in error["message"]


def test_more_choices_than_the_server_holds_at_a_time_are_refused_for_good(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={**PROMPT, "n": 5}), 400)
    assert error["message"] == "5 choices are more than this server holds at a time: 4"


def test_messages_that_the_template_does_not_take_are_refused(client: TestClient) -> None:
    messages = [{"role": "assistant", "content": "x"}]
    error = error_of(client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}), 400)
    assert "the last message is not the user's" in error["message"]


def test_a_model_without_a_template_does_not_chat(site: Site) -> None:
    site.open()
    site.tokenizer.chat_template = None
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert error_of(site.client.post("/v1/chat/completions", json=body), 400)["code"] == "no_chat_template"


def test_an_error_of_ours_is_an_answer_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.open()
    monkeypatch.setattr(site.desk, "submit", lambda requests: 1 / 0)
    assert error_of(site.client.post("/v1/completions", json=PROMPT), 500)["message"] == "an error of the server"


def test_every_answer_has_an_id_and_is_counted(client: TestClient) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/no/such/path", "/v1/models")}
    assert len(ids) == 3
    shown = client.get("/metrics")
    assert shown.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'plait_http_responses_total{path="/health",status="200"} 1.0' in shown.text
    assert 'plait_http_responses_total{path="other",status="404"} 1.0' in shown.text
    assert "no/such/path" not in shown.text


def test_a_line_is_printed_for_each_request_if_asked_for_without_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ThreadPoolExecutor(1) as threads:
        site = Site(threads, is_logged=True)
        site.open()
        with site.client:
            response = site.client.post("/v1/completions", json={**PROMPT, "prompt": "private" * 100})
            site.client.get("/caf%C3%A9%0Aforged")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{response.headers['x-request-id']} POST /v1/completions 400 ")
    assert "GET /caf\\xe9\\nforged 404 " in second
    assert "private" not in first
