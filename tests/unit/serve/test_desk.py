import asyncio
import threading

import pytest

from plait.errors import TransportError
from plait.generate.request import Capacity, Event, Request
from plait.serve.desk import Cancel, Desk, Reply, State, Wake
from plait.serve.form.refusal import Refusal
from plait.serve.metrics import Metrics

CAPACITY = Capacity(256, 64)
ONE, TWO = Request("a-0", (1, 2)), Request("a-1", (1, 2))


def token(request_id: str, number: int, *, is_last: bool = False) -> Event:
    return Event(request_id, 65, "A", "length" if is_last else None, 2, number)


def open_desk(max_in_flight: int = 4) -> Desk:
    desk = Desk(Metrics(), max_in_flight)
    desk.open(CAPACITY)
    return desk


def test_what_is_handed_in_is_taken_in_order_and_its_events_come_back() -> None:
    desk = open_desk()

    async def serve() -> list[list[tuple[int, Event]]]:
        reply = desk.submit([ONE, TWO])
        assert desk.take(0) == [ONE, TWO]
        desk.deliver([token("a-0", 1), token("a-1", 1, is_last=True)])
        first = await reply.read()
        desk.deliver([token("a-0", 2, is_last=True)])
        return [first, await reply.read(), await reply.read()]

    first, second, last = asyncio.run(serve())
    assert [(index, event.num_new_tokens) for index, event in first] == [(0, 1), (1, 1)]
    assert [(index, event.num_new_tokens) for index, event in second] == [(0, 2)]
    assert last == []


def test_a_reader_that_is_late_loses_nothing_and_keeps_nobody_waiting() -> None:
    desk = open_desk()

    async def serve() -> list[tuple[int, Event]]:
        reply = desk.submit([ONE])
        for number in range(1, 51):
            desk.deliver([token("a-0", number, is_last=number == 50)])
        await asyncio.sleep(0)
        return await reply.read()

    assert [event.num_new_tokens for _, event in asyncio.run(serve())] == list(range(1, 51))


def test_more_than_fit_are_refused_all_together_until_some_have_ended() -> None:
    desk = open_desk(max_in_flight=2)

    async def serve() -> None:
        desk.submit([ONE])
        with pytest.raises(Refusal, match="1 sequences are in flight, and 2 more would be over the 2") as caught:
            desk.submit([Request("b-0", (1,)), Request("b-1", (1,))])
        assert (caught.value.status, caught.value.code) == (503, "queue_full")
        assert desk.take(0) == [ONE]
        desk.deliver([token("a-0", 1, is_last=True)])
        await asyncio.sleep(0)
        desk.submit([Request("b-0", (1,)), Request("b-1", (1,))])

    asyncio.run(serve())


def test_a_reply_that_nobody_reads_is_cancelled_as_far_as_it_has_not_ended() -> None:
    desk = open_desk()

    async def serve() -> None:
        reply, other = desk.submit([ONE, TWO]), desk.submit([Request("b-0", (1,))])
        desk.take(0)
        desk.deliver([token("a-0", 1, is_last=True)])
        await asyncio.sleep(0)
        desk.withdraw(reply)
        assert desk.take(0) == [Cancel("a-1")]
        desk.deliver([Event("a-1", None, "", "cancelled", 2, 0), token("b-0", 1, is_last=True)])
        assert len(await other.read()) == 1

    asyncio.run(serve())


@pytest.mark.parametrize("state", [State.LOADING, State.STOPPING, State.FAILED])
def test_nothing_is_taken_in_unless_the_model_is_up(state: State) -> None:
    desk = Desk(Metrics(), 4)
    if state is not State.LOADING:
        desk.open(CAPACITY)
        desk.stop() if state is State.STOPPING else desk.fail()

    async def serve() -> None:
        with pytest.raises(Refusal) as caught:
            desk.submit([ONE])
        assert (caught.value.status, caught.value.code) == (503, state)
        assert caught.value.headers == {"Retry-After": "1"}

    asyncio.run(serve())
    assert desk.take(0) == []


def test_what_is_cancelled_by_the_server_is_an_error_for_its_reader_after_what_had_come() -> None:
    async def serve() -> None:
        reply = Reply(1)
        reply.put(0, token("a-0", 1))
        reply.put(0, Event("a-0", None, "", "cancelled", 2, 1))
        assert len(await reply.read()) == 1
        with pytest.raises(Refusal, match="shutting down"):
            await reply.read()

    asyncio.run(serve())


def test_a_failure_reaches_readers_that_wait() -> None:
    desk = open_desk()

    async def serve() -> None:
        reply = desk.submit([ONE])
        failing = threading.Timer(0.01, desk.fail)
        failing.start()
        with pytest.raises(Refusal, match="the server failed before the request was finished") as caught:
            await reply.read()
        assert caught.value.status == 500
        failing.join()

    asyncio.run(serve())


def test_a_lost_http_side_is_an_error_for_the_scheduler() -> None:
    desk = open_desk()
    desk.lose("OSError: gone")
    with pytest.raises(TransportError, match="the HTTP side of the server ended: OSError: gone"):
        desk.take(60)


def test_a_wake_up_ends_the_wait() -> None:
    desk = open_desk()
    threading.Timer(0.01, desk.wake).start()
    assert desk.take(60) == [Wake()]
