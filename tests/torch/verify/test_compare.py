"""Errors of a step against the exact one: what they are relative to, and that no mistake can pass for rounding."""

from dataclasses import replace

import pytest
import torch

from plait.config.train import TrainConfig
from plait.verify.runtime.compare import Measure, Step, derive_direction, worst_error
from plait.verify.runtime.twin import update_parameter

TRAIN = TrainConfig(learning_rate=1e-3, max_grad_norm=1.0)
BUDGET = 1e-5


def build_step(gradients, params):
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    clip = min(1.0, TRAIN.max_grad_norm / float(norm))
    updated = {name: update_parameter(params[name], gradients[name] * clip, TRAIN) for name in params}
    return Step(torch.ones(2, 3).double(), torch.tensor(1.5).double(), gradients, norm, updated)


@pytest.fixture
def exact():
    torch.manual_seed(0)
    shapes = {"wk.weight": (6, 4), "wk.bias": (6,)}
    gradients = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    gradients["wk.bias"].zero_()
    params = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    return build_step(gradients, params), params


def errors(exact, step):
    return {(quantity, name): error for quantity, name, error in Measure(exact, TRAIN, BUDGET).errors(step)}


def test_exact_step_has_no_error(exact):
    assert set(errors(exact[0], exact[0]).values()) == {0.0}


@pytest.mark.parametrize("actual", [[1.0, 3.0], [1.0, float("nan")], [1.0, float("inf")], [1.0], [[1.0, 2.0]]])
def test_wrong_values_and_wrong_shapes_are_errors(actual):
    assert worst_error(torch.tensor(actual), torch.tensor([1.0, 2.0]).double()) > 0.1


def test_error_is_relative_to_the_typical_size_where_an_element_is_small():
    assert worst_error(torch.tensor([1e-9, 1.0]), torch.tensor([0.0, 1.0]).double()) == pytest.approx(1e-9 * 2**0.5)


def test_error_is_relative_to_the_row_where_few_rows_are_large():
    """Few rows of an embedding's gradient are large, which makes rounding in them no worse."""
    exact = torch.zeros(100, 4).double()
    exact[7, 1:] = 1.0
    actual = exact.float()
    actual[7, 0] = 1e-4
    assert worst_error(actual, exact) == pytest.approx(1e-4 * (4 / 3) ** 0.5, rel=1e-3)
    actual[8, 0] = 1e-4
    assert worst_error(actual, exact) == pytest.approx(1e-4 * (400 / 3) ** 0.5, rel=1e-3)


def test_error_of_an_all_zero_tensor_is_infinite_unless_it_is_zero():
    zero = torch.zeros(3).double()
    assert worst_error(torch.zeros(3), zero) == 0
    assert worst_error(torch.full((3,), 1e-30), zero) == float("inf")


def test_bias_gradient_that_cancels_is_measured_by_its_weight_gradient(exact):
    """A key bias has a zero gradient, of which float32 leaves some 1e-8: that is rounding, while 1e-3 is a mistake."""
    step, params = exact
    for size, is_within in ((1e-8, True), (1e-3, False)):
        gradients = {**step.gradients, "wk.bias": torch.full((6,), size).double()}
        found = errors(step, build_step(gradients, params))
        assert (found["gradient", "wk.bias"] <= BUDGET) is is_within


def test_update_may_go_either_way_where_the_gradient_is_within_rounding_of_zero(exact):
    step, params = exact
    rounding = {**step.gradients, "wk.bias": torch.tensor([1, -1, 1, -1, 1, -1]).double() * 1e-6}
    assert errors(step, build_step(rounding, params))["update", "wk.bias"] <= BUDGET


@pytest.mark.parametrize(
    ("what", "change"),
    {
        "no step": lambda name, param, step: param,
        "a step the other way": lambda name, param, step: 2 * param - step.updated[name],
        "a step twice as long": lambda name, param, step: 2 * step.updated[name] - param,
        "no weight decay": lambda name, param, step: step.updated[name] + 1e-3 * TRAIN.weight_decay * param,
    }.items(),
)
def test_wrong_update_is_an_error(exact, what, change):
    step, params = exact
    name = "wk.weight"
    updated = {**step.updated, name: change(name, params[name], step)}
    assert errors(step, replace(step, updated=updated))["update", name] > BUDGET, what


def test_written_out_update_is_the_first_step_of_torch_adamw():
    torch.manual_seed(0)
    for shape in ((4, 3), (5,)):
        param, gradient = torch.randn(shape).double(), torch.randn(shape).double()
        expected = torch.nn.Parameter(param.clone())
        expected.grad = gradient
        torch.optim.AdamW(
            [expected],
            lr=TRAIN.learning_rate,
            betas=(TRAIN.beta1, TRAIN.beta2),
            eps=TRAIN.eps,
            weight_decay=TRAIN.weight_decay if len(shape) > 1 else 0.0,
        ).step()
        torch.testing.assert_close(update_parameter(param, gradient, TRAIN), expected.detach(), rtol=1e-13, atol=0)


def test_direction_rises_with_the_gradient():
    """The allowance for an updated parameter looks only at the ends of the interval of possible gradients."""
    gradient = torch.linspace(-1e-7, 1e-7, 1001).double()
    assert (derive_direction(gradient, 1e-8).diff() > 0).all()
