"""A document that is packed beside others is computed as if it were alone, on one device and by the twin."""

import pytest
import torch
from torch import nn

import plait
from plait.config.presets import load_preset
from plait.contract.context.mask import build_documents
from plait.contract.model import derive_plan
from plait.models import build_model, initialize
from plait.sharding import MeshShape

LENGTHS = [[5, 3, 1], [9], [2, 2, 4]]
"""Of three rows of nine tokens; the last token of the last row is padding."""

ROUNDING = 1e-12
"""Float64 sums of a few hundred addends in another order."""


def build(source: str, *, is_parallel: bool) -> nn.Module:
    config = load_preset(source)
    changed = {"attention_dropout": 0.0, "dropout": 0.0} if source == "gpt-tiny" else {}
    config = config.model_copy(update=changed)
    model = build_model(config, dtype=torch.float64)
    initialize(model, config, seed=1)
    if is_parallel:
        plait.parallelize(model, plait.build_mesh(MeshShape()), derive_plan(config))
    return model


@pytest.mark.parametrize("is_parallel", [False, True], ids=["plain", "twin"])
@pytest.mark.parametrize("source", ["llama-tiny", "gpt-tiny"])
def test_a_packed_document_is_computed_as_if_it_were_alone(source: str, is_parallel: bool) -> None:
    model = build(source, is_parallel=is_parallel)
    tokens = torch.randint(200, (3, 9), generator=torch.Generator().manual_seed(4))
    plait.enter_sequences(model, 9, build_documents(LENGTHS))
    packed = model(tokens).view(3, 9, -1)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = slice(start, start + length)
            plait.enter_sequences(model, length)
            alone = model(tokens[row : row + 1, document])
            assert torch.allclose(packed[row, document], alone, rtol=0, atol=ROUNDING)
            start += length


def test_without_documents_a_token_sees_what_is_before_it() -> None:
    model = build("llama-tiny", is_parallel=True)
    tokens = torch.arange(9).view(1, 9)
    plait.enter_sequences(model, 9, build_documents([[4, 5]]))
    packed = model(tokens)
    plait.enter_sequences(model, 9)
    assert not torch.allclose(packed[4:], model(tokens)[4:])
