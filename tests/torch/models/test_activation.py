"""Activations against the plain expressions, and their gradients against finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from plait import Gelu, SwiGLU

ACTIVATIONS = {
    "swiglu": (SwiGLU(), lambda gate, up: F.silu(gate) * up),
    "gelu": (Gelu(), F.gelu),
    "gelu tanh": (Gelu(approximate="tanh"), lambda up: F.gelu(up, approximate="tanh")),
}


def draw(activation, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (activation.num_inputs, 7, 5)
    return [x.to(dtype).requires_grad_() for x in 3 * torch.randn(shape, generator=generator, dtype=torch.float64)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_finite_differences(name):
    activation, _ = ACTIVATIONS[name]
    assert gradcheck(activation, draw(activation, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_plain_expression_bit_for_bit(name, dtype):
    activation, plain = ACTIVATIONS[name]
    given, expected = draw(activation, dtype), draw(activation, dtype)
    y, y_plain = activation(*given), plain(*expected)
    y.backward(torch.ones_like(y))
    y_plain.backward(torch.ones_like(y))
    assert torch.equal(y, y_plain)
    for x, other in zip(given, expected, strict=True):
        assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_go_into_memory_that_is_given(name):
    activation, plain = ACTIVATIONS[name]
    inputs = [x.detach() for x in draw(activation, torch.float32)]
    out = torch.full((9, 5), torch.nan)
    activation.compute(*inputs, out=out[1:8])
    assert torch.equal(out[1:8], plain(*inputs))
    assert out[[0, 8]].isnan().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nothing_is_kept_but_the_inputs(name):
    activation, _ = ACTIVATIONS[name]
    inputs, kept = draw(activation, torch.float32), []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        activation(*inputs)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr() for x in inputs]
