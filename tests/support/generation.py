"""Small random language models of several architectures, and what transformers itself generates with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.comm.mesh import Mesh
from plait.generate.batch import ContinuousBatch, Limits
from plait.generate.decoding import cut_for_decoding
from plait.generate.masks import derive_mask_form
from plait.generate.request import Capacity, Event, Request, SamplingConfig
from plait.generate.sampling.sample import build_vocab_shard
from plait.generate.views import Views, share_tensors
from plait.hf.directory.skeleton import build_from_config
from plait.hf.parallelize import parallelize
from tests.support import byte_tokenizer

VOCAB_SIZE = 101

_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 96,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip

_SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}

_GPT2 = {
    "vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 4, "n_head": 6, "n_positions": 96, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip

ARCHITECTURES = (*_SPECIAL, "gpt2")


def build_config(architecture: str) -> Any:
    """A config of a few thousand weights, whose sliding windows are shorter than the texts of the tests."""
    from transformers import AutoConfig

    if architecture == "gpt2":
        return AutoConfig.for_model("gpt2", **_GPT2)
    return AutoConfig.for_model(architecture, **{**_SIZES, **_SPECIAL[architecture]})


def build_model(architecture: str) -> nn.Module:
    """The same weights on every rank, in float64, in which the likeliest token is the same in every order of sums."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(build_config(architecture), dtype=torch.float64).eval()


def build_views(architecture: str, mesh: Mesh) -> Views:
    """Both views of that model, over a mesh."""
    reading = parallelize(build_model(architecture), mesh)
    decoding = reading
    if mesh.tp.degree > 1:
        decoding = cut_for_decoding(build_from_config(build_config(architecture), dtype=torch.float64), mesh)
        share_tensors(reading, decoding)
    return Views(reading, decoding, derive_mask_form(reading.config), mesh.device, torch.float64)


def build_batch(
    architecture: str, mesh: Mesh, limits: Limits | None = None, eos_ids: Sequence[int] = ()
) -> ContinuousBatch:
    """A batch of it, whose text is the numbers of the tokens."""
    return ContinuousBatch(
        build_views(architecture, mesh), build_vocab_shard(mesh, VOCAB_SIZE), decode_numbers,
        capacity=Capacity(VOCAB_SIZE, 96), eos_ids=eos_ids, limits=limits,
    )  # fmt: skip


def decode_numbers(tokens: Sequence[int]) -> str:
    """`<5><17>`."""
    return "".join(f"<{token}>" for token in tokens)


def draw_prompts(lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Random tokens, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in lengths]


def build_requests(prompts: Sequence[tuple[int, ...]], sampling: SamplingConfig) -> list[Request]:
    """One request for each prompt, named by its number."""
    return [Request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]


def run_all(batch: ContinuousBatch, requests: Sequence[Request]) -> dict[str, list[Event]]:
    """The events of all requests, which arrive at once."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    arrivals = requests
    while arrivals or batch.num_running or batch.num_waiting:
        for event in batch.step(arrivals):
            events[event.request_id].append(event)
        arrivals = ()
    return events


def list_tokens(events: Sequence[Event]) -> list[int]:
    """The tokens that came."""
    return [event.token for event in events if event.token is not None]


def generate_greedily(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates, each prompt alone, without padding and without an end."""
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
    return out[0, len(prompt) :].tolist()


def save_folder(folder: Path, architecture: str) -> Path:
    """That model as a directory, in float32, with a tokenizer whose tokens are bytes."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = build_config(architecture)
    config.vocab_size = byte_tokenizer.VOCAB_SIZE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.build_byte_tokenizer(), eos_token=byte_tokenizer.END_OF_TEXT
    )
    tokenizer.save_pretrained(folder)
    return folder
