"""The HTTP application: its paths, its key, and errors in OpenAI's form."""

import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plait.serve.desk import Desk, State
from plait.serve.form.answer import JsonObject
from plait.serve.form.chat import PromptReader
from plait.serve.form.refusal import Refusal
from plait.serve.http.access import GONE, AccessNotes
from plait.serve.http.generation import Generation
from plait.serve.metrics import CONTENT_TYPE, Metrics

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Service:
    """What the application works with."""

    model: str
    """The name that clients ask for."""
    desk: Desk
    reader: PromptReader
    metrics: Metrics
    threads: Executor
    api_key: str | None = field(default=None, repr=False)
    is_logged: bool = False
    started: int = field(default_factory=lambda: int(time.time()))


def build_app(service: Service) -> Starlette:
    """Build the application. `/health`, `/livez` and `/metrics` need no key."""
    generation = Generation(service.model, service.desk, service.reader, service.threads)
    site = _Site(service)
    guarded: list[tuple[str, str, Endpoint]] = [
        ("GET", "/v1/models", site.list_models),
        ("GET", "/v1/models/{model:path}", site.show_model),
        ("POST", "/v1/completions", generation.complete),
        ("POST", "/v1/chat/completions", generation.chat),
    ]
    return Starlette(
        routes=[
            Route("/health", site.show_health),
            Route("/livez", site.show_life),
            Route("/metrics", site.show_metrics),
            *(Route(path, _guard(endpoint, service.api_key), methods=[method]) for method, path, endpoint in guarded),
        ],
        middleware=[Middleware(AccessNotes, metrics=service.metrics, is_logged=service.is_logged)],
        exception_handlers={
            Refusal: _answer_refusal,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_failure,
        },
    )


class _Site:
    """The endpoints that say how the server is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show_health(self, request: Request) -> Response:
        """Whether requests are taken: the model is up, and the server is not about to end."""
        state = self._service.desk.state
        return JSONResponse({"status": state}, 200 if state is State.READY else 503)

    async def show_life(self, request: Request) -> Response:
        """That the process answers, also while it loads the model."""
        return JSONResponse({"status": "alive"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def show_model(self, request: Request) -> Response:
        if (model := request.path_params["model"]) != self._service.model:
            raise Refusal(404, f"there is no model {model!r}", param="model", code="model_not_found")
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> JsonObject:
        described = {
            "id": self._service.model, "object": "model", "created": self._service.started, "owned_by": "plait",
        }  # fmt: skip
        capacity = self._service.desk.capacity
        return described if capacity is None else {**described, "max_model_len": capacity.max_context}


def _guard(endpoint: Endpoint, api_key: str | None) -> Endpoint:
    """Ask for the key, if there is one, before anything is read."""
    if api_key is None:
        return endpoint
    wanted = f"Bearer {api_key}".encode()

    async def answer(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, wanted):
            problem = "the API key is wrong" if given else "no API key: send Authorization: Bearer KEY"
            raise Refusal(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return await endpoint(request)

    return answer


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), error
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException), error
    what = f"{request.method} {request.url.path}: {error.detail.lower()}"
    refusal = Refusal(error.status_code, what, code=error.detail.lower().replace(" ", "_"), headers=error.headers)
    return await _answer_refusal(request, refusal)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _answer_failure(request: Request, error: Exception) -> Response:
    """An error of ours; its traceback goes to stderr by the server that runs the application."""
    return await _answer_refusal(request, Refusal(500, "an error of the server", kind="server_error"))
