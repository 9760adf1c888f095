"""SmolLM2-135M with its real weights: 9 heads and 3 KV heads, so that tp=2 is uneven, and tied embeddings.

Text is compared token for token with transformers' own generate, in float32. Where the unsharded model itself is
undecided - its two best logits closer than the error of a float32 sum in another order - nothing could be compared;
the prompts are such that it never is.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.comm.mesh import build_mesh
from plait.generate.batch import Limits
from plait.generate.open import build_batch, load_views
from plait.generate.request import Request, SamplingConfig
from plait.generate.source import open_source
from plait.sharding import MeshShape
from tests.support.generation import list_tokens, run_all
from tests.support.smollm2 import smollm2_folder
from tests.support.source_tree import ROOT

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Q: What is 2 + 2?\nA:",
    "The three primary colours are red,",
    "My name is Alice and I live in",
    "Photosynthesis is the process by which plants convert light energy into chemical energy. It takes place in the",
    "1, 2, 3, 4, 5,",
    "Hello",
)
NUM_NEW = 12
LOGITS_BUDGET = {"rtol": 0, "atol": 2e-3}
"""Logits of up to 40 behind 30 layers of float32 sums, in another order."""

PERPLEXITY_TOKENS = 192


def read_text() -> str:
    return (ROOT / "docs" / "guides" / "train.md").read_text()


def run_smollm2(*, folder: Path, tp: int) -> tuple[list[list[int]], float, Tensor]:
    """Greedy tokens of all prompts, perplexity of the text, and own columns of its last logits."""
    mesh = build_mesh(MeshShape(tp=tp))
    source = open_source(folder)
    views = load_views(folder, mesh)
    batch = build_batch(source, views, mesh, Limits(max_prefill_tokens=32))
    sampling = SamplingConfig(max_new_tokens=NUM_NEW, ignore_eos=True)
    requests = [Request(str(n), source.encode(text), sampling) for n, text in enumerate(PROMPTS)]
    events = run_all(batch, requests)
    ids = torch.tensor([source.encode(read_text())[:PERPLEXITY_TOKENS]])
    with torch.no_grad():
        out = views.reading(input_ids=ids, labels=ids, use_cache=False)
    return [list_tokens(events[str(n)]) for n in range(len(PROMPTS))], float(out.loss.exp()), out.logits[0, -1]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[list[int]], float, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=NUM_NEW)[:, -NUM_NEW:].tolist()
    ids = torch.tensor([tokenizer(read_text())["input_ids"][:PERPLEXITY_TOKENS]])
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
    return tokens, float(out.loss.exp()), out.logits[0, -1]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_text_perplexity_and_logits_are_those_of_transformers(ranks, folder, reference, tp):
    found = ranks(tp).call(run_smollm2, folder=folder, tp=tp)
    tokens, perplexity, logits = reference
    for of_rank, perplexity_of_rank, _ in found:
        assert of_rank == tokens
        assert perplexity_of_rank == pytest.approx(perplexity, rel=1e-4)
    torch.testing.assert_close(torch.cat([columns for _, _, columns in found]), logits, **LOGITS_BUDGET)
