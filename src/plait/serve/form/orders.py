"""What a form asks of the model: one sequence for each choice of each prompt."""

import secrets
from collections.abc import Sequence

from plait.errors import ConfigError
from plait.generate.request import Capacity, Request, SamplingConfig
from plait.serve.form.forms import GenerationForm
from plait.serve.form.refusal import Refusal, refuse_length


def build_requests(
    form: GenerationForm, prompts: Sequence[tuple[int, ...]], answer_id: str, capacity: Capacity, param: str
) -> list[Request]:
    """The sequences of a form, choice by choice of prompt by prompt; `param` is where its prompts stand.

    Choice `i` is drawn with the seed of the form plus `i`, so that it is what that seed gives alone.

    Raises:
        Refusal: a prompt that the model does not take, or that leaves too little room, or settings that cannot be.
    """
    seed = secrets.randbits(62) if form.seed is None else form.seed
    requests: list[Request] = []
    for prompt in prompts:
        num_new = _count_new_tokens(form.max_new_tokens, len(prompt), capacity, param)
        for choice in range(form.num_choices):
            sampling = _build_sampling(form, seed + choice, num_new)
            try:
                request = Request(f"{answer_id}-{len(requests)}", prompt, sampling)
                capacity.check(request)
            except ConfigError as error:
                raise Refusal(400, error.message, param=param) from error
            requests.append(request)
    return requests


def _build_sampling(form: GenerationForm, seed: int, max_new_tokens: int) -> SamplingConfig:
    try:
        return SamplingConfig(
            temperature=1.0 if form.temperature is None else form.temperature,
            top_k=max(0, form.top_k or 0),
            top_p=1.0 if form.top_p is None else form.top_p,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=tuple(form.stop or ()),
            ignore_eos=bool(form.ignore_eos),
        )
    except ConfigError as error:
        raise Refusal(400, error.message) from error


def _count_new_tokens(wanted: int | None, num_prompt: int, capacity: Capacity, param: str) -> int:
    """New tokens at most: those wanted, else the default as far as the context has room for it."""
    left = capacity.max_context - num_prompt
    if left < 1 or (wanted is not None and wanted > left):
        beside = "leaves no room for an answer" if wanted is None else f"and max_tokens {wanted} are more"
        raise refuse_length(capacity.max_context, f"a prompt of {num_prompt} tokens {beside}", param)
    return min(left, capacity.default_new_tokens or left) if wanted is None else wanted
