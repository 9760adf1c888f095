"""A quantized linear against the same written with numpy and ml_dtypes: quantized tensors bit for bit."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from plait.config.recipe import RECIPES, Operand
from plait.errors import ConfigError, ShardingError
from plait.quant.linear import QuantizedLinear
from plait.quant.scheme import Scheme

T, K, N = 64, 96, 128

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}

E5M2_INPUT = replace(RECIPES["mxfp8"], input=Operand("e5m2", "current"), gradient=Operand("e2m1", "block32"))

CASES = {
    "current": RECIPES["fp8_currentscaling"],
    "e4m3 gradient": replace(RECIPES["fp8_currentscaling"], gradient=Operand("e4m3", "current")),
    "powers of two": replace(RECIPES["fp8_currentscaling"], power_of_two_scales=True),
    "delayed": replace(RECIPES["fp8_delayedscaling"], margin=1),
    "mxfp8": RECIPES["mxfp8"],
    "mxfp8, mixed along tokens": replace(RECIPES["mxfp8"], hadamard=True),
    "a format of its own for each": E5M2_INPUT,
    "nvfp4": RECIPES["nvfp4"],
    "nvfp4, powers of two": replace(RECIPES["nvfp4"], power_of_two_scales=True),
    "nvfp4, to nearest": replace(RECIPES["nvfp4"], stochastic_rounding=False),
    "nvfp4, plain": replace(RECIPES["nvfp4"], stochastic_rounding=False, hadamard=False),
}

ROUNDING = 1e-12
"""Of float64 sums of a hundred products; one wrong code among them would be 1e-4 or more."""


class Noise:
    """The same numbers whenever they are asked for, others for each orientation."""

    def draw(self, orientation, shape, device):
        draw = torch.Generator().manual_seed(len(orientation))
        return torch.rand(shape, generator=draw)


class History:
    """One that has seen steps, if told so."""

    def __init__(self, **amaxes):
        self.amaxes = amaxes
        self.noted = {}

    def note(self, tensor, amax):
        self.noted[tensor] = float(amax)

    def find_amax(self, tensor):
        return torch.tensor(self.amaxes[tensor]) if self.amaxes else None


SIGNS = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1])


def reference(x, operand, along, recipe, *, amax=None, mixes=False, noise=None):
    """What of `x` is read in blocks along dim `along`, float64: the definition, with other tools."""
    x = x.astype(np.float32)
    if mixes and along == 0:
        x = mix_reference(x)
    blocks = np.moveaxis(x, along, 1)
    noise = None if noise is None else np.moveaxis(noise, along, 1)
    amax = np.float32(np.abs(x).max() if amax is None else amax)
    largest = np.float32(ml_dtypes.finfo(FORMATS[operand.format]).max)
    if operand.block is None:
        margin = recipe.margin if operand.scaling == "delayed" else 0
        factor = floor_if(recipe.power_of_two_scales, largest / amax * np.float32(2.0**-margin))
        return np.moveaxis(round_reference(blocks * factor, operand.format, noise) / float(factor), 1, along)
    blocks = blocks.reshape(len(blocks), -1, operand.block)
    block_amax = np.abs(blocks).max(axis=2, keepdims=True)
    if operand.scaling == "block32":
        mantissa, exponent = np.frexp(block_amax / largest)
        scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
        multiplier = (1 / scale).astype(np.float32)
    else:
        tensor_scale = amax / (largest * np.float32(448))
        if recipe.power_of_two_scales:
            tensor_scale = 1 / floor_if(True, 1 / tensor_scale)
        relative = np.clip(block_amax / largest / tensor_scale, 2.0**-6, 448).astype(ml_dtypes.float8_e4m3fn)
        multiplier = (np.float32(1) / tensor_scale) / relative.astype(np.float32)
        scale = relative.astype(float) * float(tensor_scale)
    noise = None if noise is None else noise.reshape(blocks.shape)
    numbers = round_reference(blocks * multiplier, operand.format, noise) * scale
    return np.moveaxis(numbers.reshape(len(blocks), -1), 1, along)


def floor_if(wanted, factor):
    return np.float32(2.0 ** np.floor(np.log2(float(factor)))) if wanted else np.float32(factor)


def round_reference(x, format, noise):
    """To nearest by ml_dtypes; with noise, to the neighbour farther from zero where the rest is above it."""
    kind = FORMATS[format]
    x = np.clip(x, -float(ml_dtypes.finfo(kind).max), float(ml_dtypes.finfo(kind).max))
    if noise is None:
        return x.astype(kind).astype(float)
    bits = 4 if format == "e2m1" else 8
    grid = np.arange(2 ** (bits - 1), dtype=np.uint8).view(kind).astype(float)
    grid = np.sort(grid[np.isfinite(grid)])
    lower = np.clip(np.searchsorted(grid, np.abs(x), side="right") - 1, 0, len(grid) - 2)
    rest = (np.abs(x) - grid[lower]) / (grid[lower + 1] - grid[lower])
    return np.copysign(np.where(rest > noise, grid[lower + 1], grid[lower]), x)


def mix_reference(x):
    two = np.array([[1.0, 1.0], [1.0, -1.0]])
    hadamard = np.kron(np.kron(two, two), np.kron(two, two)) / 4
    mixed = hadamard @ (SIGNS.numpy().astype(float)[:, None] * x.reshape(-1, 16, x.shape[1]).astype(float))
    return mixed.reshape(x.shape).astype(np.float32)


def draw(recipe, *, dtype=torch.float64):
    """Numbers of all sizes; multiples of 1/8 where they are mixed, so that float32 sums of sixteen are exact."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in {"x": (T, K), "weight": (N, K), "bias": (N,), "grad_y": (T, N)}.items():
        spread = torch.exp2(torch.randint(-4, 5, (shape[0],) + (1,) * (len(shape) - 1), generator=generator).double())
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        tensors[name] = ((numbers * 8).round() / 8 if recipe.hadamard else numbers).float().to(dtype)
    return tensors


def build(recipe, weight, bias, history=None):
    linear = QuantizedLinear(nn.Parameter(weight), nn.Parameter(bias), recipe=recipe, name="layers.0.mlp.w_up")
    linear.noise, linear.signs, linear.history = Noise(), SIGNS, history
    return linear


def run(recipe, tensors, history=None):
    linear = build(recipe, tensors["weight"], tensors["bias"], history)
    x = tensors["x"].clone().requires_grad_()
    y = linear(x)
    y.backward(tensors["grad_y"])
    return {"y": y, "x": x.grad, "weight": linear.weight.grad, "bias": linear.bias.grad}


def expect(recipe, tensors, amaxes=None):
    """All products in float64."""
    x, w, bias, dy = (tensors[name].double().numpy() for name in ("x", "weight", "bias", "grad_y"))
    amaxes = amaxes or {}

    def read(name, tensor, along):
        orientation = "columns" if along == 0 else "rows"
        noise = Noise().draw(orientation, tensor.shape, None).numpy()
        is_noisy = name == "gradient" and recipe.stochastic_rounding
        return reference(
            tensor, recipe.operands[name], along, recipe, amax=amaxes.get(name),
            mixes=recipe.hadamard and name != "weight", noise=noise if is_noisy else None,
        )  # fmt: skip

    rows = read("gradient", dy, 1)
    # Without blocks one orientation stands for both.
    columns = rows if recipe.gradient.block is None else read("gradient", dy, 0)
    return {
        "y": read("input", x, 1) @ read("weight", w, 1).T + bias,
        "x": rows @ read("weight", w, 0),
        "weight": columns.T @ read("input", x, 0),
        "bias": rows.sum(0),
    }


def check(actual, expected, tolerance=ROUNDING):
    for name, value in actual.items():
        error = np.abs(value.detach().double().numpy() - expected[name]).max() / np.abs(expected[name]).max()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient_are_products_of_quantized_tensors(case):
    recipe = CASES[case]
    tensors = draw(recipe)
    check(run(recipe, tensors, History()), expect(recipe, tensors))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize("tensor", ["input", "weight", "gradient"])
def test_quantized_tensors_are_the_reference_bit_for_bit(case, tensor, orientation):
    recipe = CASES[case]
    scheme = Scheme("linear", recipe, History(), Noise(), SIGNS)
    x = draw(recipe)[{"input": "x", "weight": "weight", "gradient": "grad_y"}[tensor]]
    quantized = scheme.quantize(tensor, x, (orientation,), scheme.find_scales(tensor, x, (orientation,), notes=False))
    is_noisy = tensor == "gradient" and recipe.stochastic_rounding
    expected = reference(
        x.numpy(), recipe.operands[tensor], ("columns", "rows").index(orientation), recipe,
        mixes=recipe.hadamard and tensor != "weight",
        noise=Noise().draw(orientation, x.shape, None).numpy() if is_noisy else None,
    )  # fmt: skip
    actual = quantized.dequantize(orientation, torch.float64).numpy()
    # A tensor's scale is 1/s in float64, and divided by s here: a rounding apart, where codes are 1/16 apart.
    np.testing.assert_allclose(actual, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("case", ["current", "mxfp8", "nvfp4"])
def test_other_dtypes_read_the_same_numbers_and_keep_their_dtype(case, dtype, tolerance):
    """Sums of a hundred float32 products, and one rounding to the dtype."""
    recipe = CASES[case]
    tensors = draw(recipe, dtype=dtype)
    results = run(recipe, tensors)
    assert {value.dtype for value in results.values()} == {dtype}
    check(results, expect(recipe, tensors), tolerance)


def test_delayed_scales_come_from_the_history_and_the_current_amax_is_noted():
    recipe = CASES["delayed"]
    amaxes = {"input": 3.0, "weight": 90.0, "gradient": 7.5}
    tensors, history = draw(recipe), History(**amaxes)
    check(run(recipe, tensors, history), expect(recipe, tensors, amaxes))
    names = {"input": "x", "weight": "weight", "gradient": "grad_y"}
    assert history.noted == {name: float(tensors[own].abs().max()) for name, own in names.items()}


def test_nothing_is_noted_where_no_gradient_is_wanted():
    recipe = CASES["delayed"]
    tensors, history = draw(recipe), History()
    with torch.no_grad():
        build(recipe, tensors["weight"], tensors["bias"], history)(tensors["x"])
    assert not history.noted


@pytest.mark.parametrize(("case", "row_bytes"), [("current", K), ("mxfp8", K + K // 32), ("nvfp4", K // 2 + K // 16)])
def test_of_the_input_bytes_of_one_orientation_are_kept(case, row_bytes):
    recipe = CASES[case]
    tensors = draw(recipe, dtype=torch.float32)
    linear = build(recipe, tensors["weight"], tensors["bias"])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear(tensors["x"].requires_grad_())
    kept = {(tuple(tensor.shape), tensor.dtype) for tensor in saved}
    assert kept == {((N, K), torch.float32), ((T, row_bytes), torch.uint8)}


def test_leading_dims_are_tokens():
    recipe = CASES["mxfp8"]
    tensors = draw(recipe)
    linear = build(recipe, tensors["weight"], tensors["bias"])
    y = linear(tensors["x"].view(2, 4, 8, K))
    assert torch.equal(y.view(T, N), linear(tensors["x"]))


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_only_the_gradients_that_are_wanted_are_computed(frozen):
    recipe = CASES["nvfp4"]
    tensors = draw(recipe)
    linear = build(recipe, tensors["weight"], tensors["bias"])
    x = tensors["x"].requires_grad_(frozen != "x")
    if frozen != "x":
        linear.get_parameter(frozen).requires_grad_(False)
    linear(x).backward(tensors["grad_y"])
    tensors["x"] = x.detach()
    actual = {"x": x.grad, "weight": linear.weight.grad, "bias": linear.bias.grad}
    assert actual.pop(frozen) is None
    check(actual, expect(recipe, tensors))


def test_tokens_without_gradients_need_no_whole_blocks():
    recipe = CASES["nvfp4"]
    tensors = draw(recipe)
    linear = build(recipe, tensors["weight"], tensors["bias"])
    with torch.no_grad():
        assert linear(tensors["x"][:7]).shape == (7, N)
    with pytest.raises(ShardingError, match=r"layers\.0\.mlp\.w_up: 7 tokens are no whole blocks of 16.*nvfp4"):
        linear(tensors["x"][:7])


@pytest.mark.parametrize(("shape", "message"), [((N, 80), "80 input features"), ((40, K), "40 output features")])
def test_features_that_are_no_whole_blocks_are_refused_at_once(shape, message):
    with pytest.raises(ShardingError, match=f"w_up: {message} are no whole blocks of 32"):
        build(CASES["mxfp8"], torch.zeros(shape), torch.zeros(shape[0]))


@pytest.mark.parametrize(
    ("case", "missing", "message"),
    [
        ("nvfp4", "noise", "stochastic rounding has no numbers"),
        ("nvfp4", "signs", "the Hadamard transform has no signs"),
        ("delayed", "history", "delayed scaling of the input has no history"),
    ],
)
def test_what_a_linear_has_not_been_given_is_named(case, missing, message):
    tensors = draw(CASES[case])
    linear = build(CASES[case], tensors["weight"], tensors["bias"], History())
    setattr(linear, missing, None)
    with pytest.raises(ConfigError, match=rf"layers\.0\.mlp\.w_up: {message}"):
        linear(tensors["x"]).sum().backward()
