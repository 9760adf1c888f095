"""Gradient norm and clipping of an unsharded model; sharded ones: tests/dist."""

import pytest
import torch
from torch import nn

from plait import clip_grad_norm_


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)).to(dtype)
    model[2].weight = model[0].weight
    for index, param in enumerate(model.parameters()):
        param.grad = torch.randn_like(param) * (index + 1)
    return model


@pytest.mark.parametrize("max_norm", [0.5, 1e6, float("inf")])
def test_equals_torchs_on_an_unsharded_model(max_norm):
    ours, theirs = build_model(torch.float64), build_model(torch.float64)
    norm = clip_grad_norm_(ours, max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_tied_parameter_is_counted_once():
    model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    assert clip_grad_norm_(model, 1.0).item() == 2


def test_half_gradients_are_summed_in_float32():
    """4096 times 1 is 4096 in float32; bfloat16 stops counting ones at 256, and cannot hold the root of 4095."""
    model = nn.Linear(4095, 1, bias=False).bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    norm = clip_grad_norm_(model, 1e9)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(4095.0).sqrt())
    assert model.weight.grad.dtype == torch.bfloat16


def test_gradients_of_several_dtypes_are_clipped_together():
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).bfloat16()])
    model[0].weight.grad, model[1].weight.grad = torch.full((1, 1), 3.0), torch.full((1, 1), 4.0).bfloat16()
    assert clip_grad_norm_(model, 2.5).item() == 5
    assert [layer.weight.grad.item() for layer in model] == pytest.approx([1.5, 2.0], rel=1e-6)


def test_parameters_without_a_gradient_are_left_out():
    model = build_model()
    model[1].bias.grad = None
    expected = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), expected)
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0


def test_a_norm_that_is_not_finite_shows():
    model = build_model()
    model[1].bias.grad[0] = float("nan")
    assert clip_grad_norm_(model, 1.0).isnan()
    assert all(param.grad.isnan().all() for param in model.parameters())
