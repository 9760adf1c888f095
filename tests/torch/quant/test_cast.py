"""Quantized matrices: where bytes lie, and that any whole blocks of rows are a matrix of their own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.contract.quantization import Orientation
from plait.quant import pieces
from plait.quant.cast import Quantized, quantize
from plait.quant.formats import decode, encode, pack
from plait.quant.hadamard import mix
from plait.quant.pieces import list_pieces
from plait.quant.scale import decode_block_scales
from plait.sharding import Interval
from tests.support.quantized_matrices import BOTH, OPERANDS, quantize_alone

SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)
EACH = pytest.mark.parametrize("name", list(OPERANDS))
BLOCKED = pytest.mark.parametrize("name", [name for name in OPERANDS if "block" in name])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.randint(-6, 6, shape, generator=generator).float().exp2()


@EACH
@pytest.mark.parametrize("orientations", [("rows",), ("columns",), BOTH])
def test_a_row_has_the_bytes_that_contracts_say(name: str, orientations: tuple[Orientation, ...]) -> None:
    quantized = quantize_alone(draw(64, 96), OPERANDS[name], orientations)
    assert quantized.payload.shape == (64, len(orientations) * OPERANDS[name].row_bytes(96))
    assert quantized.payload.dtype == torch.uint8
    assert quantized.payload.is_contiguous()


def test_codes_lie_before_the_scales_of_the_blocks_of_the_row() -> None:
    x = torch.zeros(2, 64)
    x[0, 0], x[0, 40], x[1, 63] = 448.0, 2.0 * 448, -0.5 * 448
    payload = quantize_alone(x, OPERANDS["e4m3 block32"], ("rows",)).payload
    # 0x7E is 448; scales are 2**(code - 127), and 0 where all is zero.
    assert payload[0].tolist() == [0x7E] + [0] * 39 + [0x7E] + [0] * 23 + [127, 128]
    assert payload[1].tolist() == [0] * 63 + [0xFE] + [0, 126]


def test_scales_of_blocks_of_columns_are_spread_over_their_rows() -> None:
    x = torch.zeros(64, 64)
    x[:32], x[32:] = 448.0, 2.0 * 448
    x[:32, 2] = 4.0 * 448
    payload = quantize_alone(x, OPERANDS["e4m3 block32"], ("columns",)).payload
    # A row carries 64 / 32 bytes of them: row 1 those of columns 2 and 3.
    assert payload[:, 64:].tolist() == [[127, 127], [129, 127]] + [[127, 127]] * 30 + [[128, 128]] * 32


def test_two_numbers_lie_in_a_byte() -> None:
    x = torch.tensor([[6.0, -3.0] + [0.0] * 14])
    payload = quantize_alone(x, OPERANDS["e2m1 block16"], ("rows",)).payload
    assert payload.tolist() == [[0xD7] + [0] * 7 + [0x7E]]


@EACH
def test_orientations_lie_one_after_the_other_and_do_not_depend_on_each_other(name: str) -> None:
    x = draw(64, 96)
    both = quantize_alone(x, OPERANDS[name], signs=SIGNS)
    alone = [quantize_alone(x, OPERANDS[name], (orientation,), signs=SIGNS).payload for orientation in BOTH]
    assert torch.equal(both.payload, torch.cat(alone, dim=1))


@EACH
def test_numbers_are_codes_times_scales(name: str) -> None:
    operand, quantized = OPERANDS[name], quantize_alone(draw(64, 96), OPERANDS[name])
    for orientation in BOTH:
        numbers = decode(quantized.view_codes(orientation), operand.format).double()
        scales = quantized.view_block_scales(orientation)
        if scales is not None:
            dim = 1 if orientation == "rows" else 0
            as_numbers = decode_block_scales(scales, operand).double()
            numbers *= as_numbers.repeat_interleave(operand.block or 1, dim)
        assert torch.equal(quantized.decode(orientation, torch.float64), numbers)
        assert torch.equal(quantized.decode(orientation, torch.float32).double(), numbers)
        scale = quantized.scale_of(orientation)
        expected = numbers if scale is None else numbers * scale
        assert torch.equal(quantized.dequantize(orientation, torch.float64), expected)


@EACH
def test_numbers_are_near_what_was_quantized(name: str) -> None:
    x = draw(64, 96)
    quantized = quantize_alone(x, OPERANDS[name])
    # Half of the last bit of each mantissa; what is small beside its scale loses more.
    bits = {"e4m3": 3, "e5m2": 2, "e2m1": 1}[OPERANDS[name].format]
    for orientation in BOTH:
        error = (quantized.dequantize(orientation, torch.float64) - x).norm() / x.double().norm()
        assert 0 < error < 2.0 ** -(bits + 1)


def test_without_blocks_one_orientation_stands_for_both() -> None:
    quantized = quantize_alone(draw(64, 96), OPERANDS["e4m3 current"], ("columns",))
    assert torch.equal(quantized.decode("rows", torch.float32), quantized.decode("columns", torch.float32))
    assert quantized.scale_of("rows") is quantized.scales[0]


def test_with_blocks_no_orientation_stands_for_the_other() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        quantize_alone(draw(64, 96), OPERANDS["e4m3 block32"], ("rows",)).decode("columns", torch.float32)


@EACH
@given(start=st.integers(0, 4), length=st.integers(0, 4))
def test_rows_of_a_quantized_matrix_are_those_rows_quantized(name: str, start: int, length: int) -> None:
    x = draw(256, 32)
    whole = quantize_alone(x, OPERANDS[name], signs=SIGNS)
    rows = Interval(32 * start, 32 * (start + length))
    part = quantize(x[rows.start : rows.stop], whole.operand, BOTH, whole.scales, signs=SIGNS)
    assert torch.equal(whole.narrow(rows).payload, part.payload)
    for orientation in BOTH:
        expected = whole.decode(orientation, torch.float32)[rows.start : rows.stop]
        assert torch.equal(whole.narrow(rows).decode(orientation, torch.float32), expected)


@EACH
@given(start=st.integers(0, 2), length=st.integers(1, 3))
def test_columns_of_a_quantized_matrix_are_those_columns_quantized(name: str, start: int, length: int) -> None:
    x = draw(32, 192)
    whole = quantize_alone(x, OPERANDS[name], signs=SIGNS)
    columns = slice(32 * start, 32 * (start + length))
    part = quantize(x[:, columns], whole.operand, BOTH, whole.scales, signs=SIGNS)
    for orientation in BOTH:
        expected = whole.decode(orientation, torch.float32)[:, columns]
        assert torch.equal(part.decode(orientation, torch.float32), expected)


@EACH
def test_what_ranks_quantized_is_gathered_to_what_one_would_have(name: str) -> None:
    x = draw(96, 64)
    whole = quantize_alone(x, OPERANDS[name], signs=SIGNS)
    shards = [quantize(x[rows], whole.operand, BOTH, whole.scales, signs=SIGNS) for rows in _cut(32, 96)]
    gathered = shards[0].with_payload(torch.cat([shard.payload for shard in shards]))
    for orientation in BOTH:
        assert torch.equal(gathered.decode(orientation, torch.float64), whole.decode(orientation, torch.float64))


def _cut(*edges: int) -> list[slice]:
    return [slice(start, stop) for start, stop in zip((0, *edges[:-1]), edges, strict=True)]


@EACH
def test_pieces_leave_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, noise = draw(256, 64), torch.rand(256, 64, generator=torch.Generator().manual_seed(3))

    def run() -> Quantized:
        return quantize_alone(x, OPERANDS[name], noise=(noise, noise.flip(0)), signs=SIGNS)

    whole = run()
    monkeypatch.setattr(pieces, "_PIECE", 1)
    assert len(list(list_pieces(x.device, 256, 64))) == 8
    parts = run()
    assert torch.equal(whole.payload, parts.payload)
    assert torch.equal(whole.decode("columns", torch.float32), parts.decode("columns", torch.float32))
    assert parts.scales == whole.scales


@BLOCKED
@given(exponent=st.integers(-30, 30))
def test_powers_of_two_pass_to_the_scales(name: str, exponent: int) -> None:
    x = draw(32, 64)
    one, other = quantize_alone(x, OPERANDS[name]), quantize_alone(x * 2.0**exponent, OPERANDS[name])
    for orientation in BOTH:
        assert torch.equal(one.view_codes(orientation), other.view_codes(orientation))
        numbers = one.dequantize(orientation, torch.float64) * 2.0**exponent
        assert torch.equal(other.dequantize(orientation, torch.float64), numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@EACH
def test_other_dtypes_are_seen_as_float32(name: str, dtype: torch.dtype) -> None:
    x = draw(32, 64).to(dtype)
    assert torch.equal(quantize_alone(x, OPERANDS[name]).payload, quantize_alone(x.float(), OPERANDS[name]).payload)


@EACH
def test_matrices_need_not_be_contiguous(name: str) -> None:
    x = draw(64, 32).T
    assert torch.equal(
        quantize_alone(x, OPERANDS[name]).payload, quantize_alone(x.contiguous(), OPERANDS[name]).payload
    )


def test_columns_are_mixed_before_they_are_quantized() -> None:
    x = draw(32, 64)
    mixed = quantize_alone(x, OPERANDS["e2m1 block16"], signs=SIGNS)
    plain = quantize_alone(mix(x, SIGNS), OPERANDS["e2m1 block16"])
    assert torch.equal(mixed.decode("columns", torch.float32), plain.decode("columns", torch.float32))
    assert torch.equal(
        mixed.decode("rows", torch.float32), quantize_alone(x, OPERANDS["e2m1 block16"]).decode("rows", torch.float32)
    )


@EACH
def test_each_orientation_is_rounded_by_its_own_noise(name: str) -> None:
    x, never = draw(32, 64), torch.full((32, 64), 1 - 2.0**-24)
    always = torch.zeros(32, 64)
    noisy = quantize_alone(x, OPERANDS[name], noise=(always, never))
    rows, columns = (noisy.dequantize(orientation, torch.float64).abs() for orientation in BOTH)
    wide = x.double().abs()
    # Noise zero goes away from zero wherever the format allows, noise near one goes to zero.
    assert (rows >= wide * (1 - 2**-22)).float().mean() > 0.9
    assert (columns <= wide * (1 + 2**-22)).all()


def test_codes_are_encoded_with_the_scale_applied_first() -> None:
    x = draw(32, 32)
    quantized = quantize_alone(x, OPERANDS["e4m3 current"], ("rows",))
    assert torch.equal(quantized.payload, encode(x * (torch.tensor(448.0) / x.abs().max()), "e4m3"))
    by_blocks = quantize_alone(x, OPERANDS["e2m1 block32"], ("rows",))
    exponents = (x.abs().amax(1, keepdim=True) / torch.tensor(6.0)).log2().ceil()
    assert torch.equal(by_blocks.payload[:, :16], pack(encode(x * (-exponents).exp2(), "e2m1")))


@EACH
def test_gradients_do_not_pass(name: str) -> None:
    x = draw(32, 32)
    tracked = quantize_alone(x.clone().requires_grad_(), OPERANDS[name], signs=SIGNS)
    assert torch.equal(tracked.payload, quantize_alone(x, OPERANDS[name], signs=SIGNS).payload)
    assert not any(scale.requires_grad for scale in tracked.scales if scale is not None)
