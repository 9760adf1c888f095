"""A continuous batch on one rank gives each request what transformers gives it alone, whatever runs beside it."""

import pytest
import torch

from plait.comm.mesh import Mesh, build_mesh
from plait.errors import ConfigError
from plait.generate.batch import ContinuousBatch, Limits
from plait.generate.request import Request, SamplingConfig
from plait.sharding import MeshShape
from tests.support.generation import (
    ARCHITECTURES,
    build_batch,
    build_model,
    build_requests,
    decode_numbers,
    draw_prompts,
    generate_greedily,
    list_tokens,
    run_all,
)

LENGTHS = [1, 3, 20, 9, 33]
GREEDY = SamplingConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return build_mesh(MeshShape(tp=1))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of the Llama."""
    model = build_model("llama")
    return [generate_greedily(model, prompt, 12) for prompt in draw_prompts(LENGTHS)]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_requests=2, max_prefill_tokens=7)], ids=["free", "narrow"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(mesh: Mesh, architecture: str, limits: Limits) -> None:
    """Wrong positions, masks, windows or rows of the cache would show; narrow limits cut prompts and make some wait."""
    model, prompts = build_model(architecture), draw_prompts(LENGTHS)
    events = run_all(build_batch(architecture, mesh, limits), build_requests(prompts, GREEDY))
    for number, prompt in enumerate(prompts):
        assert list_tokens(events[str(number)]) == generate_greedily(model, prompt, 12), (architecture, number)
        assert [event.num_new_tokens for event in events[str(number)]] == list(range(1, 13))
        assert events[str(number)][-1].finish_reason == "length"


def test_log_probabilities_are_those_of_the_model(mesh: Mesh) -> None:
    (prompt,) = draw_prompts([9])
    events = run_all(build_batch("llama", mesh), build_requests([prompt], GREEDY))["0"]
    ids = torch.tensor([[*prompt, *list_tokens(events)]])
    with torch.no_grad():
        log_probs = build_model("llama")(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    found = torch.tensor([event.log_prob for event in events], dtype=torch.float64)
    torch.testing.assert_close(found, log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0])


def test_requests_that_come_and_go_change_nothing_for_others(mesh: Mesh, expected: list[list[int]]) -> None:
    """Rows move when one ends: keys and values have to move with them."""
    prompts = draw_prompts(LENGTHS)
    batch = build_batch("llama", mesh, Limits(max_requests=3, max_prefill_tokens=10))
    requests = [Request(str(n), prompt, SamplingConfig(max_new_tokens=4 + 2 * n)) for n, prompt in enumerate(prompts)]
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for step in range(60):
        arrivals = requests[step // 3 : step // 3 + 1] if step % 3 == 0 else []
        for event in batch.step(arrivals):
            tokens[event.request_id].append(event.token or 0)
        assert batch.num_running <= 3
    assert [tokens[str(n)] for n in range(5)] == [expected[n][: 4 + 2 * n] for n in range(5)]
    assert (batch.num_running, batch.num_waiting, batch.cache.num_bytes) == (0, 0, 0)


def test_a_long_prompt_stalls_nobody(mesh: Mesh) -> None:
    long, short, running = draw_prompts([90, 4, 3])
    batch = build_batch("llama", mesh, Limits(max_prefill_tokens=8))
    batch.step([Request("running", running, GREEDY)])
    seen: dict[str, list[int]] = {"running": [], "long": [], "short": []}
    arrivals = [Request("long", long, SamplingConfig(max_new_tokens=2)), Request("short", short, GREEDY)]
    for step in range(14):
        for event in batch.step(arrivals):
            seen[event.request_id].append(step)
        arrivals = []
    assert seen["running"] == list(range(11))
    assert seen["short"][:2] == [0, 1]
    assert seen["long"][0] == 11, "4 + 8 * 10 tokens and the rest of the prompt in the twelfth step"


def test_seeded_sampling_does_not_depend_on_the_batch(mesh: Mesh) -> None:
    prompts = draw_prompts([5, 5, 12])
    settings = [
        SamplingConfig(temperature=1.5, seed=3, max_new_tokens=8),
        SamplingConfig(temperature=1.5, seed=4, top_k=9, max_new_tokens=8),
        SamplingConfig(temperature=1.5, seed=5, top_p=0.9, max_new_tokens=8),
    ]
    requests = [Request(str(n), *pair) for n, pair in enumerate(zip(prompts, settings, strict=True))]
    together = run_all(build_batch("llama", mesh), requests)
    for request in requests:
        alone = run_all(build_batch("llama", mesh, Limits(max_prefill_tokens=3)), [request])
        assert list_tokens(alone[request.id]) == list_tokens(together[request.id])


def run_one(batch: ContinuousBatch, sampling: SamplingConfig) -> list:
    prompts = draw_prompts(LENGTHS)
    return run_all(batch, [Request("a", prompts[2], sampling)])["a"]


def test_an_end_of_sequence_token_ends_a_request_and_is_no_text(mesh: Mesh, expected: list[list[int]]) -> None:
    tokens = expected[2]
    eos, count = tokens[4], tokens.index(tokens[4]) + 1
    events = run_one(build_batch("llama", mesh, eos_ids=[0, eos]), GREEDY)
    assert list_tokens(events) == tokens[:count]
    assert "".join(event.text for event in events) == decode_numbers(tokens[: count - 1])
    assert [event.finish_reason for event in events] == [None] * (count - 1) + ["stop"]
    ignoring = run_one(build_batch("llama", mesh, eos_ids=[0, eos]), SamplingConfig(max_new_tokens=12, ignore_eos=True))
    assert list_tokens(ignoring) == tokens


def test_a_stop_text_ends_a_request_in_front_of_it(mesh: Mesh, expected: list[list[int]]) -> None:
    tokens = expected[2]
    stop = f"{str(tokens[3])[-1]}><{str(tokens[4])[0]}"
    whole = decode_numbers(tokens)
    events = run_one(build_batch("llama", mesh), SamplingConfig(max_new_tokens=12, stop=(stop,)))
    assert "".join(event.text for event in events) == whole[: whole.index(stop)]
    assert events[-1].finish_reason == "stop"
    assert len(list_tokens(events)) <= 5


def test_the_end_of_the_context_is_the_end(mesh: Mesh) -> None:
    (prompt,) = draw_prompts([90])
    events = run_all(build_batch("llama", mesh), build_requests([prompt], SamplingConfig(max_new_tokens=100)))["0"]
    assert len(events) == 6
    assert events[-1].finish_reason == "length"
    assert list_tokens(events) == generate_greedily(build_model("llama"), prompt, 6)


def test_cancelled_requests_end_wherever_they_are(mesh: Mesh, expected: list[list[int]]) -> None:
    prompts = draw_prompts(LENGTHS)
    batch = build_batch("llama", mesh, Limits(max_requests=3, max_prefill_tokens=24))
    tokens: list[int] = []
    arrivals = build_requests(prompts, GREEDY)
    ended: dict[str, int] = {}
    for step in range(16):
        for event in batch.step(arrivals, {1: ["1"], 2: ["3", "4", "unknown"]}.get(step, [])):
            if event.finish_reason == "cancelled":
                assert (event.token, event.text, event.log_prob) == (None, "", None)
                ended[event.request_id] = event.num_new_tokens
            elif event.request_id == "2":
                tokens.append(event.token or 0)
        arrivals = []
    assert ended == {"1": 1, "3": 1, "4": 0}
    assert tokens == expected[2]
    assert batch.num_running == 0


def test_a_request_that_overflows_fails_alone(mesh: Mesh, expected: list[list[int]]) -> None:
    """What it left in its row of the cache does not reach who comes there after it, through a mask."""
    batch = build_batch("llama", mesh, Limits(max_requests=2))
    bad, *good = draw_prompts(LENGTHS)[:4]
    events = list(batch.step(build_requests([bad], GREEDY)))
    with torch.inference_mode():
        for pair in batch.cache.layers.values():
            for tensor in pair:
                tensor[0] = float("nan")
    requests = [Request(f"good {number}", tuple(prompt), GREEDY) for number, prompt in enumerate(good)]
    events += batch.step(requests)
    while batch.num_running or batch.num_waiting:
        events += batch.step()
    assert [event.finish_reason for event in events if event.request_id == "0"] == [None, "failed"]
    for number in range(3):
        assert list_tokens([e for e in events if e.request_id == f"good {number}"]) == expected[number + 1]


def test_bad_arrivals_are_refused_before_anything_changes(mesh: Mesh) -> None:
    batch = build_batch("llama", mesh, Limits(max_cache_tokens=40))
    with pytest.raises(ConfigError, match="a prompt of 40 tokens and one new token do not fit into the context of 40"):
        batch.step([Request("a", (5,)), Request("b", (5,) * 40)])
    with pytest.raises(ConfigError, match="token id 101 is not in the vocabulary"):
        batch.step([Request("a", (101,))])
    with pytest.raises(ConfigError, match="another one of this id has not ended"):
        batch.step([Request("a", (5,)), Request("a", (6,))])
    assert (batch.num_running, batch.num_waiting, batch.step()) == (0, 0, [])
    batch.step([Request("a", (5,))])
    with pytest.raises(ConfigError, match="request a: another one of this id has not ended"):
        batch.step([Request("a", (5,))])


def test_the_cache_never_has_to_hold_more_than_its_limit(mesh: Mesh) -> None:
    """Two of 30 + 10 tokens fit into 80, a third waits although there are rows for it."""
    requests = build_requests(draw_prompts([30, 30, 30]), SamplingConfig(max_new_tokens=10))
    batch = build_batch("llama", mesh, Limits(max_cache_tokens=80))
    batch.step(requests)
    assert (batch.num_running, batch.num_waiting) == (2, 1)
    while batch.num_running or batch.num_waiting:
        batch.step()
    assert batch.num_waiting == 0


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        Limits(max_requests=0, max_prefill_tokens=-1)
