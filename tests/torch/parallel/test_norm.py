"""RMSNorm as one node of autograd, against torch's in float64, and where it leaves the work to torch."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from plait.contract.plan import Plan
from plait.parallel.apply import parallelize
from plait.parallel.region.half import Half, compute_half
from plait.parallel.region.norm import RMSNorm, RMSNormFunction
from plait.sharding import build_split
from tests.support.lone_mesh import build_lone_mesh

EPS = 1e-5
SHAPES = [(1, 1), (5, 24), (64, 256), (300, 64), (21, 4099), (2, 3, 31), (7,)]
ERROR = 2
"""Of the error of torch's own in the same type; to the last bit of the largest value both are right."""


def build_norm(width: int, dtype: torch.dtype = torch.float64, eps: float | None = EPS) -> RMSNorm:
    norm = RMSNorm(width, eps=eps, dtype=dtype)
    nn.init.normal_(norm.weight, 1, 0.3, generator=torch.Generator().manual_seed(1))
    return norm


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def differentiate(norm: nn.Module, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of input and weight."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return y.detach(), *torch.autograd.grad(y, (x, norm.weight), grad_y)


def as_torch(norm: RMSNorm) -> nn.RMSNorm:
    plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, dtype=norm.weight.dtype)
    plain.load_state_dict(norm.state_dict())
    return plain


def is_one_node(y: Tensor) -> bool:
    return type(y.grad_fn) is RMSNormFunction._backward_cls


@pytest.mark.parametrize("eps", [EPS, None, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(shape, eps):
    norm = build_norm(shape[-1], eps=eps)
    given = norm, draw(*shape), draw(*shape, seed=2)
    for own, torchs in zip(differentiate(*given), differentiate(as_torch(norm), *given[1:]), strict=True):
        assert own.shape == torchs.shape
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_it_is_as_exact_as_torch(shape, dtype):
    """In norm against float64. Not rows of one number, whose gradient is a difference of two that are nearly equal."""
    norm, x, grad_y = build_norm(shape[-1], dtype), draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=2)
    exact = differentiate(as_torch(norm).double(), x.double(), grad_y.double())
    own, torchs = differentiate(norm, x, grad_y), differentiate(as_torch(norm), x, grad_y)
    for value, other, true in zip(own, torchs, exact, strict=True):
        assert value.dtype == other.dtype == dtype
        one_bit = torch.finfo(dtype).eps * true.abs().max()
        assert (value - true).norm() <= max(ERROR * (other - true).norm(), one_bit)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of torch's own, which tells that it is slow
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64], ids=str)
def test_types_are_those_of_torch_where_the_weight_has_another(weight_dtype):
    norm, x = build_norm(24, weight_dtype), draw(5, 24, dtype=torch.bfloat16)
    own, torchs = (differentiate(each, x, x) for each in (norm, as_torch(norm)))
    for value, other in zip(own, torchs, strict=True):
        assert value.dtype == other.dtype
        torch.testing.assert_close(value, other)


@pytest.mark.parametrize("size", [1e-18, 1e-12, 1e18], ids=str)
def test_small_and_large_values_are_normalised(size):
    """Up to where a sum of squares overflows. At 1e18 torch's own gradient lacks a term, whose third power is zero."""
    norm = build_norm(64, torch.float32, eps=1e-24)
    x, grad_y = size * draw(5, 64, dtype=torch.float32), draw(5, 64, dtype=torch.float32, seed=2)
    exact = differentiate(as_torch(norm).double(), x.double(), grad_y.double())
    for own, true in zip(differentiate(norm, x, grad_y), exact, strict=True):
        torch.testing.assert_close(own.double(), true, rtol=1e-5, atol=1e-6 * float(true.abs().max()))


def test_gradients_are_those_of_finite_differences():
    norm = build_norm(5)
    x = draw(2, 3, 5).requires_grad_()
    assert gradcheck(lambda x, weight: functional_call(norm, {"weight": weight}, x), (x, norm.weight))


def test_gradients_of_gradients_are_refused():
    norm, x = build_norm(5), draw(3, 5).requires_grad_()
    (grad_x,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_x.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 24, 31, 64, 257, 1024])
def test_a_token_alone_has_the_bits_that_it_has_among_others(width, dtype):
    """What sharded tokens rest on; `grad_x` also where others are few, many and not in blocks."""
    norm, num_tokens = build_norm(width, dtype), 67
    x, grad_y = draw(num_tokens, width, dtype=dtype), draw(num_tokens, width, dtype=dtype, seed=2)
    y, grad_x, _ = differentiate(norm, x, grad_y)
    for start, stop in pairwise((0, 1, 2, 4, 7, 23, 67)):
        own = differentiate(norm, x[start:stop].clone(), grad_y[start:stop].clone())
        assert torch.equal(own[0], y[start:stop])
        assert torch.equal(own[1], grad_x[start:stop])


def test_it_repeats_itself_bit_for_bit_in_any_layout():
    norm, x, grad_y = build_norm(48, torch.float32), draw(4, 6, 48).float(), draw(4, 6, 48, seed=2).float()
    first = differentiate(norm, x, grad_y)
    with_gaps = torch.zeros(4, 6, 96)[..., ::2].copy_(x)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for again in (x, with_gaps, turned):
        for value, other in zip(first, differentiate(norm, again, grad_y), strict=True):
            assert torch.equal(value, other)
    y, grad_x, _ = differentiate(norm, x, torch.ones(()).expand(4, 6, 48))
    assert y.shape == grad_x.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24)], ids=str)
def test_nothing_is_kept_but_the_input_the_weight_and_a_number_a_token(shape, dtype):
    norm, x, kept = build_norm(24, dtype), draw(*shape, dtype=dtype).requires_grad_(), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm(x)
    own, weight, scale = kept
    assert own.data_ptr() == x.data_ptr()
    assert weight.data_ptr() == norm.weight.data_ptr()
    assert (scale.numel(), scale.dtype) == (6, torch.float32)


def test_what_is_frozen_costs_nothing_and_what_is_not_gets_its_gradient(monkeypatch):
    sums, norm, x = [], build_norm(5), draw(3, 5)
    monkeypatch.setattr(Tensor, "sum", lambda *args, **kwargs: sums.append(args) or torch.sum(*args, **kwargs))
    monkeypatch.setattr("plait.parallel.region.norm._aten", None)  # the kernel of `grad_x`
    norm(x).backward(x)
    assert norm.weight.grad is not None
    assert len(sums) == 1
    monkeypatch.undo()
    monkeypatch.setattr(Tensor, "sum", None)
    norm.weight.requires_grad_(requires_grad=False)
    x.requires_grad_()
    norm(x).backward(torch.ones(3, 5, dtype=torch.float64))
    assert x.grad is not None


def test_of_a_split_backward_each_half_is_computed_once(monkeypatch):
    norm, x = build_norm(5), draw(3, 5).requires_grad_()
    y = norm(x)
    whole = torch.autograd.grad(y, (x, norm.weight), torch.ones_like(y), retain_graph=True)
    halves = []
    for half in (Half.INPUTS, Half.WEIGHTS):
        with compute_half(half):
            wanted = (x, norm.weight)
            halves.append(torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True, allow_unused=True))
    (grad_x, no_weight), (no_x, grad_weight) = halves
    assert no_weight is None
    assert no_x is None
    assert torch.equal(grad_x, whole[0])
    assert torch.equal(grad_weight, whole[1])


def test_it_is_torchs_module_in_all_else():
    norm, plain = RMSNorm(5, eps=EPS), nn.RMSNorm(5, eps=EPS)
    assert repr(norm) == repr(plain)
    assert list(norm.state_dict()) == list(plain.state_dict())
    norm.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients_the_values_are_the_same(context):
    norm, x = build_norm(5), draw(3, 5)
    y = norm(x)
    assert is_one_node(y)
    with context():
        assert torch.equal(norm(x), y)


def test_under_autocast_the_types_are_those_of_torch():
    norm = build_norm(24, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = draw(3, 24, dtype=dtype)
            own, torchs = norm(x), as_torch(norm)(x)
            assert is_one_node(own)
            assert own.dtype == torchs.dtype
            torch.testing.assert_close(own, torchs)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)], ids=str)
def test_without_tokens_nothing_comes_of_them(shape):
    y, grad_x, grad_weight = differentiate(build_norm(5), draw(*shape), draw(*shape))
    assert y.shape == grad_x.shape == shape
    assert torch.equal(grad_weight, torch.zeros(5, dtype=torch.float64))


def test_what_is_no_row_of_numbers_on_a_cpu_is_left_to_torch():
    x = draw(2, 3, 5)
    assert torch.equal(RMSNorm((3, 5), eps=EPS).double()(x), F.rms_norm(x, (3, 5), eps=EPS))
    assert torch.equal(RMSNorm(5, eps=EPS, elementwise_affine=False)(x), F.rms_norm(x, (5,), eps=EPS))
    assert build_norm(5).to("meta")(x.to("meta")).shape == x.shape
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[7\]"):
        build_norm(7)(x)


def test_functional_transforms_see_torchs_operations():
    norm, x = build_norm(5), draw(3, 5)
    grads = torch.func.grad(lambda weights: functional_call(norm, weights, x).sum())(dict(norm.named_parameters()))
    y = norm(x)
    torch.testing.assert_close(grads["weight"], torch.autograd.grad(y.sum(), norm.weight)[0])
    torch.testing.assert_close(torch.func.vmap(norm)(x), y)


def test_a_compiler_is_given_torchs_operations():
    norm, x, seen = build_norm(5), draw(3, 5), []

    def note(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    y = torch.compile(norm, backend=note, fullgraph=True)(x)
    assert [target.__name__ for target in seen] == ["rms_norm"]
    torch.testing.assert_close(y, norm(x))


class Other(nn.RMSNorm):
    """Somebody's own, whose forward may be another."""


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("role", ["token_local", "in_region"])
def test_parallelize_puts_it_in_place_of_torchs(role, sequence_parallel):
    """The object stays, and with it its parameters, mode and hooks."""
    inside, other, calls = nn.RMSNorm(5, eps=EPS).eval(), Other(5), []
    weight = inside.weight
    inside.register_forward_hook(lambda *_: calls.append("hook"))
    mesh = build_lone_mesh(2)
    mesh.tokens = build_split(6, 2)
    plan = Plan({"norm": role, "other": role}, sequence_parallel=sequence_parallel)
    model = parallelize(nn.ModuleDict({"norm": inside, "other": other}), mesh, plan)
    assert type(inside) is RMSNorm
    assert type(other) is Other
    assert not inside.training
    assert model["norm"].weight is weight
    x = draw(3, 5).float().requires_grad_()
    y = model["norm"](x)
    assert is_one_node(y)
    assert calls == ["hook"]
    assert torch.equal(y, RMSNormFunction.apply(x, weight, EPS))
