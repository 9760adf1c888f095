"""What a precision recipe means for one linear: on one device, with whole tensors.

A sharded linear under the same recipe has to give the same numbers, and is compared with this one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.autograd.once import once_differentiable
from plait.config.recipe import Recipe
from plait.contract.quantization import list_orientations
from plait.errors import ShardingError
from plait.quant.matmul import find_accumulator, multiply, prepare
from plait.quant.native import find_capability
from plait.quant.scheme import AmaxHistory, RoundingNoise, Scheme
from plait.quant.select import Gemm, KernelChoice, select_kernels


class QuantizedLinear(nn.Module):
    """Linear that multiplies quantized tensors.

        x           [T, K]      any leading dims
        w           [N, K]
        y           [T, N]

        forward     y = q(x) @ q(w).T + bias            in blocks along K
        dgrad       grad_x = q(grad_y) @ q(w)           in blocks along N
        wgrad       grad_w = q(grad_y).T @ q(x)         in blocks along T
        bias        grad_bias = sum over T of q(grad_y) as dgrad reads it

    Each q(...) rounds the tensor itself, never what another q(...) gave. Of x only what wgrad reads is kept for
    backward, as bytes; w is quantized again, to the same bits. Products are summed in float32, or in float64 where the
    tensors are float64; whatever they are, quantizers see them in float32.

    Attributes:
        history: the earlier steps of delayed scaling.
        noise: what stochastic rounding goes by.
        signs: those of the Hadamard transform.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, recipe: Recipe, name: str) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.recipe = recipe
        self.name = name
        self.history: AmaxHistory | None = None
        self.noise: RoundingNoise | None = None
        self.signs: Tensor | None = None
        check_features(weight.shape, recipe, name)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`. Named as in nn.Linear.

        Raises:
            ShardingError: gradients are wanted, and the tokens are no whole blocks.
        """
        x = input.flatten(0, -2)
        # Inside the function a parameter wants its gradient even where none is recorded.
        is_recorded = torch.is_grad_enabled()
        if is_recorded and self.weight.requires_grad:
            check_tokens(x.shape[0], self.recipe, self.name)
        scheme = Scheme(self.name, self.recipe, self.history, self.noise, self.signs)
        y: Tensor = QuantizedLinearFunction.apply(x, self.weight, self.bias, scheme, is_recorded)
        return y.view(*input.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Shape and recipe."""
        return f"{list(self.weight.shape)}, {self.recipe.name}"


class QuantizedLinearFunction(torch.autograd.Function):
    """The three GEMMs of a `QuantizedLinear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scheme: Scheme, is_recorded: bool) -> Tensor:
        needs_weight, dtype = is_recorded and ctx.needs_input_grad[1], find_accumulator(x.dtype)
        read = list_orientations(scheme.recipe.input, ("forward", "wgrad") if needs_weight else ("forward",))
        x_scales = scheme.find_scales("input", x, read, notes=is_recorded)
        w_scales = scheme.find_scales("weight", weight, ("rows",), notes=is_recorded)
        x_rows = scheme.quantize("input", x, ("rows",), x_scales[:1])
        w_rows = scheme.quantize("weight", weight, ("rows",), w_scales)
        y = x.new_empty(x.shape[0], weight.shape[0])
        kernel = find_kernels(scheme.recipe, x.device, x.dtype)["forward"].kernel
        factor = prepare(w_rows, "rows", dtype, kernel=kernel).T
        multiply(prepare(x_rows, "rows", dtype, kernel=kernel), factor, bias, out=y)

        is_read_both_ways = len(read) > 1
        kept = scheme.quantize("input", x, read[1:], x_scales[1:]) if is_read_both_ways else x_rows
        ctx.scheme, ctx.w_scales, ctx.kept = scheme, w_scales, replace(kept, payload=kept.payload.new_empty(0))
        ctx.save_for_backward(weight, kept.payload if needs_weight else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, payload = ctx.saved_tensors
        scheme: Scheme = ctx.scheme
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gemms = (*(("dgrad",) if needs_x or needs_bias else ()), *(("wgrad",) if needs_weight else ()))
        read, dtype = list_orientations(scheme.recipe.gradient, gemms), find_accumulator(grad_y.dtype)
        if not read:
            return (None,) * 5
        grad = scheme.quantize("gradient", grad_y, read, scheme.find_scales("gradient", grad_y, read, notes=True))
        kernels = find_kernels(scheme.recipe, grad_y.device, grad_y.dtype)
        grad_x = grad_weight = None
        if needs_x:
            grad_x, kernel = grad_y.new_empty(grad_y.shape[0], weight.shape[1]), kernels["dgrad"].kernel
            w_columns = scheme.quantize("weight", weight, ("columns",), ctx.w_scales)
            factor = prepare(w_columns, "columns", dtype, kernel=kernel)
            multiply(prepare(grad, "rows", dtype, kernel=kernel), factor, None, out=grad_x)
        if needs_weight:
            grad_weight, kernel = torch.empty_like(weight), kernels["wgrad"].kernel
            kept = ctx.kept.with_payload(payload)
            factor = prepare(kept, kept.orientations[0], dtype, kernel=kernel)
            multiply(prepare(grad, read[-1], dtype, kernel=kernel).T, factor, None, out=grad_weight)
        grad_bias = grad.dequantize("rows", dtype).sum(0).to(grad_y.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None


@lru_cache
def find_kernels(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Mapping[Gemm, KernelChoice]:
    """What multiplies `dtype` tensors on `device` under `recipe`, and why."""
    capability, in_float64 = find_capability(device), find_accumulator(dtype) == torch.float64
    return select_kernels(recipe, device_type=device.type, capability=capability, sums_in_float64=in_float64)


def check_features(shape: Sequence[int], recipe: Recipe, name: str) -> None:
    """The features of a weight `[N, K]` are whole blocks, as forward and dgrad contract them.

    Raises:
        ShardingError: they are not.
    """
    unit = recipe.feature_unit
    for what, size in zip(("output", "input"), shape, strict=True):
        if size % unit:
            raise ShardingError(
                f"{name}: {size} {what} features are no whole blocks of {unit}, which {recipe.name} quantizes in",
                hint="take a recipe without blocks, or leave this linear out",
            )


def check_tokens(num_tokens: int, recipe: Recipe, name: str) -> None:
    """The tokens of a pass with a backward are whole blocks, as wgrad contracts them.

    Raises:
        ShardingError: they are not.
    """
    unit = recipe.token_unit
    if num_tokens % unit:
        raise ShardingError(
            f"{name}: {num_tokens} tokens are no whole blocks of {unit}, along which {recipe.name} quantizes for wgrad",
            hint=f"make batch times sequence a multiple of {unit}",
        )
