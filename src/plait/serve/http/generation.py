"""From the body of a request to its answer, whole or as a stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from plait.generate import request as generate
from plait.serve.desk import Desk, Reply
from plait.serve.form.answer import Answer, ChatAnswer, Choice, CompletionAnswer, JsonObject
from plait.serve.form.chat import PromptReader
from plait.serve.form.forms import ChatForm, CompletionForm, GenerationForm, read_form
from plait.serve.form.orders import build_requests
from plait.serve.form.refusal import Refusal
from plait.serve.http.body import read_body
from plait.serve.http.stream import EventStream, unless_gone


@dataclass(frozen=True)
class _Prepared:
    """A request that can be handed in."""

    form: GenerationForm
    requests: list[generate.Request]
    answer: Answer


class Generation:
    """The two endpoints that generate, for the model that is served as `model`.

    Bodies are parsed and tokenized in `threads`, so that a long one delays nobody's stream.
    """

    def __init__(self, model: str, desk: Desk, reader: PromptReader, threads: Executor) -> None:
        self._model = model
        self._desk = desk
        self._reader = reader
        self._threads = threads

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, self._prepare_completion)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, self._prepare_chat)

    async def _generate(self, request: Request, prepare: Callable[[bytes, str], _Prepared]) -> Response:
        self._desk.check_ready()
        body = await read_body(request)
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._threads, prepare, body, request.scope["request_id"])
        reply = self._desk.submit(prepared.requests)
        choices = [Choice(index) for index in range(len(prepared.requests))]
        let_go = partial(self._let_go, request, prepared.answer, reply, choices)
        if prepared.form.stream:
            return EventStream(_stream(prepared, reply, choices), let_go)
        try:
            await unless_gone(request.receive, _collect(prepared.answer, reply, choices))
        finally:
            let_go()
        return JSONResponse(prepared.answer.build_whole(choices))

    def _let_go(self, request: Request, answer: Answer, reply: Reply, choices: Sequence[Choice]) -> None:
        """Whatever has ended it, nobody reads on: free the places that it has."""
        self._desk.withdraw(reply)
        request.scope["usage"] = answer.build_usage(choices)

    # --- in a thread of their own ------------------------------------------------------------------------------------

    def _prepare_completion(self, body: bytes, request_id: str) -> _Prepared:
        form = read_form(CompletionForm, body)
        capacity = self._check(form, len(form.prompt))
        prompts = [
            self._reader.read_text(prompt, capacity.max_context) if isinstance(prompt, str) else tuple(prompt)
            for prompt in form.prompt
        ]
        answer = self._begin(CompletionAnswer, f"cmpl-{request_id}", form)
        return _Prepared(form, build_requests(form, prompts, answer.id, capacity, "prompt"), answer)

    def _prepare_chat(self, body: bytes, request_id: str) -> _Prepared:
        form = read_form(ChatForm, body)
        capacity = self._check(form, 1)
        prompt = self._reader.read_chat(form.messages, capacity.max_context)
        answer = self._begin(ChatAnswer, f"chatcmpl-{request_id}", form)
        return _Prepared(form, build_requests(form, [prompt], answer.id, capacity, "messages"), answer)

    def _begin(self, kind: type[Answer], answer_id: str, form: GenerationForm) -> Answer:
        show_token = self._reader.show_token if form.has_log_probs else None
        return kind(answer_id, int(time.time()), self._model, form.num_choices, show_token)

    def _check(self, form: GenerationForm, num_prompts: int) -> generate.Capacity:
        """What the model takes, if it is the one that is asked, and not for more than the server holds.

        Raises:
            Refusal: it is not.
        """
        if form.model != self._model:
            raise Refusal(
                404, f"there is no model {form.model!r}: this server has {self._model!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        num_sequences, most = num_prompts * form.num_choices, self._desk.max_in_flight
        if num_sequences > most:
            raise Refusal(400, f"{num_sequences} choices are more than this server holds at a time: {most}", param="n")
        assert self._desk.capacity is not None, self._desk.state
        return self._desk.capacity


async def _collect(answer: Answer, reply: Reply, choices: Sequence[Choice]) -> None:
    while events := await reply.read():
        for index, event in events:
            choices[index].add(event, answer.show_token)


async def _stream(prepared: _Prepared, reply: Reply, choices: Sequence[Choice]) -> AsyncIterator[list[JsonObject]]:
    """The chunks of a stream, as many at a time as have come."""
    answer, includes_usage = prepared.answer, prepared.form.includes_usage
    if opening := answer.list_opening(range(len(choices)), includes_usage):
        yield opening
    while events := await reply.read():
        pieces = [choices[index].add(event, answer.show_token) for index, event in events]
        if chunks := [answer.build_chunk(piece, includes_usage) for piece in pieces if not piece.is_empty]:
            yield chunks
    if includes_usage:
        yield [answer.build_usage_chunk(choices)]
