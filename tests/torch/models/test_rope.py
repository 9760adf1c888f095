"""Rotary positions against the definition: a pair of features is a complex number, turned by its position."""

from math import pi

import pytest
import torch

from plait.config.model import Llama3RopeScaling, LlamaConfig
from plait.models.rope import apply_rope, build_rope_tables, derive_rope_frequencies

HEAD_WIDTH = 8
SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def build_config(**changes: object) -> LlamaConfig:
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16, "vocab_size": 16}
    return LlamaConfig(**{**sizes, "max_seq_len": 64, **changes})


def test_turns_pair_i_of_position_s_by_s_times_its_frequency():
    """Pair i is features i and i + H/2: the rotate-half order of Hugging Face weights."""
    x = torch.randn(2, 5, 3, HEAD_WIDTH, dtype=torch.float64)
    turned = apply_rope(x, build_rope_tables(build_config(), torch.arange(5), like=x))
    for position in range(5):
        for pair in range(HEAD_WIDTH // 2):
            second = pair + HEAD_WIDTH // 2
            angle = torch.tensor(position * 10_000.0 ** (-2 * pair / HEAD_WIDTH), dtype=torch.float64)
            before = torch.complex(x[:, position, :, pair], x[:, position, :, second])
            after = before * torch.polar(torch.ones_like(angle), angle)
            torch.testing.assert_close(turned[:, position, :, pair], after.real)
            torch.testing.assert_close(turned[:, position, :, second], after.imag)


def scale_as_published(frequency: float) -> float:
    """The piecewise form of Llama 3.1's reference code, in wavelengths."""
    wavelength = 2 * pi / frequency
    if wavelength < SCALING.original_max_seq_len / SCALING.high_freq_factor:
        return frequency
    if wavelength > SCALING.original_max_seq_len / SCALING.low_freq_factor:
        return frequency / SCALING.factor
    span = SCALING.high_freq_factor - SCALING.low_freq_factor
    smooth = (SCALING.original_max_seq_len / wavelength - SCALING.low_freq_factor) / span
    return (1 - smooth) * frequency / SCALING.factor + smooth * frequency


def test_llama3_scaling_equals_the_published_one():
    config = build_config(width=256, rope_theta=500_000.0)
    plain = derive_rope_frequencies(config)
    scaled = derive_rope_frequencies(config.model_copy(update={"rope_scaling": SCALING}))
    expected = torch.tensor([scale_as_published(frequency) for frequency in plain.tolist()], dtype=torch.float64)
    torch.testing.assert_close(scaled, expected)
    ratios = scaled / plain
    assert (ratios == 1).any()
    assert (ratios == 1 / 8).any()
    assert ((ratios > 1 / 8) & (ratios < 1)).any()


@pytest.mark.parametrize(
    ("activation", "table"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_tables_are_rounded_once_to_at_least_float32(activation, table):
    x = torch.randn(1, 40, 2, HEAD_WIDTH, dtype=activation)
    tables = build_rope_tables(build_config(), torch.arange(40), like=x)
    exact = build_rope_tables(build_config(), torch.arange(40), like=x.double())
    assert tables.cos.dtype == tables.sin.dtype == table
    assert torch.equal(tables.cos, exact.cos.to(table))
    assert apply_rope(x, tables).dtype == activation
