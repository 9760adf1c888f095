"""The reordered model computes the same function, with its sums taken in another order."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from plait.config.recipe import RECIPES
from plait.quant.linear import QuantizedLinear
from plait.verify.runtime.reordering import apply_reordering


def run(model, x, grad_y):
    x = x.clone().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y, [x, *model.parameters()], grad_y)
    return [y, *grads]


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(97, 65), nn.Linear(65, 33, bias=False)).to(dtype)


def test_reordered_linears_are_the_same_function():
    model, reordered = build(torch.float64), build(torch.float64)
    apply_reordering(reordered)
    x, grad_y = torch.randn(29, 97).double(), torch.randn(29, 33).double()
    for actual, expected in zip(run(reordered, x, grad_y), run(model, x, grad_y), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_forward_dgrad_and_wgrad_are_all_summed_in_another_order():
    """Otherwise the reordering error would be zero for that part, and judge nothing."""
    model, reordered = build(torch.float32), build(torch.float32)
    apply_reordering(reordered)
    x, grad_y = torch.randn(290, 97), torch.randn(290, 33)
    for actual, expected in zip(run(reordered, x, grad_y), run(model, x, grad_y), strict=True):
        assert not torch.equal(actual, expected)


def test_integers_are_equal_in_any_order():
    model, reordered = build(torch.float32), build(torch.float32)
    for one in (model, reordered):
        for name, param in one.named_parameters():
            param.data.copy_(torch.arange(param.numel()).view(param.shape).remainder(7) - 3.0 - len(name) % 2)
    apply_reordering(reordered)
    x, grad_y = torch.randint(-3, 4, (29, 97)).float(), torch.randint(-3, 4, (29, 33)).float()
    for actual, expected in zip(run(reordered, x, grad_y), run(model, x, grad_y), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("recipe", ["fp8_currentscaling", "mxfp8", "nvfp4"])
def test_sums_of_a_quantized_linear_are_exact_in_float64(recipe):
    """So there is nothing to reorder: blocks of inputs in another order give the same bits."""
    torch.manual_seed(0)
    x, weight = torch.randn(32, 128).double(), torch.randn(64, 128).double()
    order = torch.arange(128).view(-1, 32).flip(0).flatten()
    plain = replace(RECIPES[recipe], hadamard=False)
    y, reordered = (
        QuantizedLinear(nn.Parameter(w), None, recipe=plain, name="linear")(each)
        for each, w in ((x, weight), (x[:, order], weight[:, order]))
    )
    assert torch.equal(y, reordered)
