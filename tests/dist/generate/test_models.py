"""Tensor-parallel generation gives the tokens of the unsharded model; prompts are read in one mode, decoded in another.

Random models in float64: the likeliest token is the same in every order of sums, so tokens are compared, not numbers.
Narrow limits cut prompts and move rows, uneven heads and replicated KV heads cut the cache unevenly.
"""

import pytest

from plait.comm.mesh import build_mesh
from plait.generate.batch import Limits
from plait.generate.request import Request, SamplingConfig
from plait.sharding import MeshShape
from tests.support.generation import (
    ARCHITECTURES,
    build_batch,
    build_model,
    build_requests,
    build_views,
    draw_prompts,
    generate_greedily,
    list_tokens,
    run_all,
)

LENGTHS = [1, 3, 20, 9, 33]
GREEDY = SamplingConfig(max_new_tokens=10)
NARROW = Limits(max_requests=3, max_prefill_tokens=10)
DRAWN = [
    SamplingConfig(temperature=1.5, seed=3, max_new_tokens=10),
    SamplingConfig(temperature=1.5, seed=4, top_k=9, max_new_tokens=10),
    SamplingConfig(temperature=1.5, seed=5, top_p=0.9, max_new_tokens=10),
]


def run_architecture(*, tp: int, architecture: str) -> tuple[list[list[int]], list[list[int]]]:
    batch = build_batch(architecture, build_mesh(MeshShape(tp=tp)), NARROW)
    greedy = run_all(batch, build_requests(draw_prompts(LENGTHS), GREEDY))
    requests = [Request(str(n), prompt, DRAWN[n]) for n, prompt in enumerate(draw_prompts([5, 5, 12]))]
    drawn = run_all(batch, requests)
    return [list_tokens(greedy[str(n)]) for n in range(5)], [list_tokens(drawn[str(n)]) for n in range(3)]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_the_unsharded_model(ranks, architecture, tp):
    """Greedy ones those of transformers' own generate, drawn ones those of one rank."""
    model = build_model(architecture)
    expected = [generate_greedily(model, prompt, 10) for prompt in draw_prompts(LENGTHS)]
    _, alone = run_architecture(tp=1, architecture=architecture)
    for greedy, drawn in ranks(tp).call(run_architecture, tp=tp, architecture=architecture):
        assert greedy == expected
        assert drawn == alone


def run_views(*, tp: int) -> list[tuple[bool, int]]:
    views = build_views("llama", build_mesh(MeshShape(tp=tp)))
    pairs = zip(views.reading.named_parameters(), views.decoding.named_parameters(), strict=True)
    return [(name == twin and one is other, one.numel()) for (name, one), (twin, other) in pairs]


def test_both_views_have_one_set_of_parameters(ranks):
    """Neither the weights nor the rotary frequencies are there twice, and none is left without memory."""
    num_whole = sum(param.numel() for param in build_model("llama").parameters())
    found = ranks(3).call(run_views, tp=3)
    assert all(is_same for of_rank in found for is_same, _ in of_rank)
    assert all(sum(numel for _, numel in of_rank) < num_whole / 2 for of_rank in found)


def run_bytes(*, tp: int) -> tuple[int, list[int]]:
    batch = build_batch("llama", build_mesh(MeshShape(tp=tp)))
    batch.step([Request("a", (5, 6, 7), GREEDY)])
    return batch.cache.bytes_per_token, [keys.shape[1] for keys, _ in batch.cache.layers.values()]


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, [2, 1]), (3, [1, 1, 1])])
def test_a_rank_caches_its_own_kv_heads_only(ranks, tp, kv_heads):
    """3 KV heads of width 8 in 4 layers of float64: 512 bytes per token and head."""
    found = ranks(tp).call(run_bytes, tp=tp)
    assert [heads for _, heads in found] == [[count] * 4 for count in kv_heads]
    assert [num_bytes for num_bytes, _ in found] == [512 * count for count in kv_heads]
