from typing import Any

import pytest

from plait.generate.request import Capacity, Request, SamplingConfig
from plait.serve.form.forms import CompletionForm
from plait.serve.form.orders import build_requests
from plait.serve.form.refusal import Refusal

CAPACITY = Capacity(vocab_size=10, max_context=8)


def build(prompts: list[tuple[int, ...]], **values: Any) -> list[Request]:
    form = CompletionForm(model="m", prompt="", **values)
    return build_requests(form, prompts, "id", CAPACITY, "prompt")


def test_choices_follow_each_other_prompt_by_prompt_with_seeds_that_follow_each_other() -> None:
    requests = build([(1,), (2, 3)], n=2, seed=5, max_tokens=3)
    assert [(each.id, each.prompt, each.sampling.seed) for each in requests] == [
        ("id-0", (1,), 5), ("id-1", (1,), 6), ("id-2", (2, 3), 5), ("id-3", (2, 3), 6),
    ]  # fmt: skip


def test_values_are_passed_on() -> None:
    (request,) = build([(1,)], temperature=0.5, top_p=0.9, top_k=3, seed=1, stop=["a"], ignore_eos=True, max_tokens=2)
    assert request.sampling == SamplingConfig(0.5, 3, 0.9, 1, 2, ("a",), ignore_eos=True)


def test_without_a_seed_no_two_answers_are_alike_on_purpose() -> None:
    (first,), (second,) = build([(1,)], max_tokens=2), build([(1,)], max_tokens=2)
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.temperature == 1.0


def test_top_k_of_minus_one_keeps_all() -> None:
    assert build([(1,)], top_k=-1, max_tokens=1)[0].sampling.top_k == 0


def test_a_prompt_and_its_answer_may_fill_the_context() -> None:
    assert build([(1,) * 5], max_tokens=3)[0].sampling.max_new_tokens == 3


@pytest.mark.parametrize("length", [6, 8, 100])
def test_a_prompt_that_leaves_too_little_room_is_refused_with_the_values(length: int) -> None:
    with pytest.raises(Refusal, match=f"8 tokens: a prompt of {length} tokens and max_tokens 3 are more") as caught:
        build([(1,), (1,) * length], max_tokens=3)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")


def test_a_token_that_there_is_not_is_refused() -> None:
    with pytest.raises(Refusal, match="token id 10 is not in the vocabulary 0:10"):
        build([(10,)], max_tokens=1)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(Refusal, match="the prompt has no tokens"):
        build([()], max_tokens=1)


def test_settings_that_nothing_can_be_drawn_with_are_refused() -> None:
    with pytest.raises(Refusal, match="temperature 1e-40 is not 0 or at least") as caught:
        build([(1,)], max_tokens=1, temperature=1e-40)
    assert caught.value.param is None
