"""Quantized matrices against torchao's, bit for bit: codes, scales of blocks and scales of tensors.

torchao's own block formats are prototypes, so they are what we compare with and not what we call.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config.recipe import Operand
from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized
from plait.quant.native import swizzle
from plait.quant.scale import derive_scale, find_multiplier
from tests.support.quantized_matrices import quantize_alone

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class TorchAO:
    to_scale: Callable[..., Tensor]
    to_float8: Callable[..., Tensor]
    to_mx: Callable[..., tuple[Tensor, Tensor]]
    mode: Any
    to_nvfp4: Callable[..., tuple[Tensor, Tensor]]
    to_tensor_scale: Callable[[Tensor], Tensor]
    to_blocked: Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def torchao() -> TorchAO:
    pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
        from torchao.prototype.mx_formats.utils import to_blocked
    rceil = ScaleCalculationMode.RCEIL
    return TorchAO(amax_to_scale, to_fp8_saturated, to_mx, rceil, nvfp4_quantize, per_tensor_amax_to_scale, to_blocked)


def draw(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Rows and columns of very different magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(192, 160, generator=generator)
    x *= torch.randint(-12, 12, (192, 1), generator=generator).float().exp2()
    x *= torch.randint(-6, 6, (1, 160), generator=generator).float().exp2()
    x[32:64, 32:96] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_one_scale_of_a_tensor(torchao: TorchAO, dtype: torch.dtype, fmt: Any, power_of_two: bool, seed: int) -> None:
    x = draw(dtype, seed=seed)
    quantized = quantize_alone(x, Operand(fmt, "current"), ("rows",), power_of_two=power_of_two)
    scale = torchao.to_scale(x.abs().max(), DTYPES[fmt], round_scales_to_power_of_2=power_of_two)
    expected = torchao.to_float8(x.float() * scale, DTYPES[fmt]).view(torch.uint8)
    assert quantized.scales[0] is not None
    assert torch.equal(find_multiplier(quantized.scales[0]), scale)
    assert torch.equal(quantized.payload, expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_scales_of_tensors_over_all_magnitudes(torchao: TorchAO, fmt: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-38, 110, (1 << 16,), generator=generator)
    amaxes = (1 + torch.rand(1 << 16, generator=generator)).ldexp(exponents)
    ours = find_multiplier(derive_scale(amaxes, Operand(fmt, "current")))
    assert torch.equal(ours, torchao.to_scale(amaxes, DTYPES[fmt]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_32(torchao: TorchAO, dtype: torch.dtype, fmt: Any, seed: int) -> None:
    x = draw(dtype, seed=seed)
    quantized = quantize_alone(x, Operand(fmt, "block32"))
    for orientation, matrix in (("rows", x), ("columns", x.T.contiguous())):
        scales, codes = torchao.to_mx(matrix, DTYPES[fmt], 32, scaling_mode=torchao.mode)
        _compare(quantized, orientation, codes.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_16(torchao: TorchAO, dtype: torch.dtype, seed: int) -> None:
    x = draw(dtype, seed=seed)
    operand = Operand("e2m1", "block16")
    quantized = quantize_alone(x, operand)
    tensor_scale = torchao.to_tensor_scale(x.abs().max())
    for orientation, matrix in (("rows", x), ("columns", x.T.contiguous())):
        scales, packed = torchao.to_nvfp4(matrix, per_tensor_scale=tensor_scale)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        _compare(quantized, orientation, codes, scales.view(torch.uint8))
    assert quantized.scales[0] is not None
    assert quantized.scales[0] == tensor_scale


def test_scales_of_blocks_differ_only_where_a_logarithm_has_rounded(torchao: TorchAO) -> None:
    # torchao takes the ceiling of a float32 log2; the GPU's instruction and we look at the bits, which is exact.
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-100, 100, (1 << 14, 1), generator=generator)
    amaxes = (1 + torch.rand(1 << 14, 1, generator=generator)).ldexp(exponents)
    just_above = torch.tensor([[448.0]]).nextafter(torch.tensor(torch.inf)) * 2.0**60
    x = torch.cat((amaxes, just_above)).expand(-1, 32).contiguous()
    scales, _ = torchao.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=torchao.mode)
    ours = quantize_alone(x, Operand("e4m3", "block32"), ("rows",)).view_block_scales("rows")
    assert ours is not None
    assert torch.equal(ours[:-1], scales.view(torch.uint8)[:-1])
    assert (ours[-1].item(), scales.view(torch.uint8)[-1].item()) == (127 + 61, 127 + 60)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 6), (300, 12), (0, 4)])
def test_scales_lie_as_the_kernels_read_them(torchao: TorchAO, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    assert torch.equal(swizzle(scales), torchao.to_blocked(scales))


def _compare(quantized: Quantized, orientation: Orientation, codes: Tensor, scales: Tensor) -> None:
    ours, our_scales = quantized.view_codes(orientation), quantized.view_block_scales(orientation)
    assert our_scales is not None
    if orientation == "columns":
        ours, our_scales = ours.T, our_scales.T
    assert torch.equal(our_scales, scales.view(our_scales.shape))
    assert torch.equal(ours, codes)
