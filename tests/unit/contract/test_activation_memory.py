"""Bytes kept for backward, against Korthikanti et al., "Reducing Activation Recomputation", arXiv:2205.05198.

With s tokens a sequence, b sequences, width h, a heads and t ranks a layer keeps

    sbh (34 + 5as/h)              bytes unsharded                 (equation 1)
    sbh (10 + 24/t + 5as/(ht))    under tensor parallelism        (equation 2)
    sbh/t (34 + 5as/h)            with sequence parallelism too   (equation 4)
"""

from fractions import Fraction

import pytest

from plait.config.model import GptConfig
from plait.config.presets import load_preset
from plait.contract.model import derive_model
from plait.contract.op import Op
from plait.contract.setting import Setting

PRESETS = ["gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"]
GIB = 2**30
RECOMPUTED = ("probabilities", "mask", "dropped")
"""What selective recomputation of the attention does not keep (section 5 of the paper)."""


def load(preset: str) -> GptConfig:
    config = load_preset(preset)
    assert isinstance(config, GptConfig)
    return config


def derive_block_ops(config: GptConfig, batch: int, tp: int, *, sequence_parallel: bool) -> tuple[Op, ...]:
    return derive_model(config, Setting(batch, 2048, tp, sequence_parallel=sequence_parallel)).block


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_keeps_what_the_paper_says(preset: str, tp: int, sequence_parallel: bool) -> None:
    config, s, b = load(preset), 2048, 2
    h, a = config.width, config.num_heads
    scores = Fraction(5 * a * s, h * tp)
    per_token = Fraction(34, tp) + scores if sequence_parallel else 10 + Fraction(24, tp) + scores
    ops = derive_block_ops(config, b, tp, sequence_parallel=sequence_parallel)
    assert sum(op.saved_bytes for op in ops) == s * b * h * per_token


@pytest.mark.parametrize(
    ("preset", "batch", "stages", "chunks", "tensor_parallel_gib", "selective_gib"),
    [
        ("gpt-22b", 4, 1, 1, 59.25, 9.5625),
        ("gpt-175b", 1, 8, 3, 66.84375, 12.3515625),
        ("gpt-530b", 1, 35, 3, 114.0234375, 23.076171875),
        ("gpt-1t", 1, 64, 1, 131.25, 26.5625),
    ],
)
def test_figure_1(
    preset: str, batch: int, stages: int, chunks: int, tensor_parallel_gib: float, selective_gib: float
) -> None:
    """Activation memory of the first pipeline stage at tp 8, without and with sequence parallelism and recomputation.

    The first stage keeps as many micro-batches as there are stages, interleaved schedules a few more (section 4.2.3).
    """
    config = load(preset)
    layers = config.num_layers * (1 + Fraction(stages - 1, stages * chunks) if chunks > 1 else 1)
    plain = sum(op.saved_bytes for op in derive_block_ops(config, batch, 8, sequence_parallel=False))
    selective = sum(
        saved.num_bytes
        for op in derive_block_ops(config, batch, 8, sequence_parallel=True)
        for saved in op.saved
        if not (op.name.endswith(".attention") and saved.name in RECOMPUTED)
    )
    assert float(layers * plain / GIB) == tensor_parallel_gib
    assert float(layers * selective / GIB) == selective_gib


def test_fused_attention_keeps_no_scores() -> None:
    config = load("gpt-22b").model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    h, a, tokens = config.width, config.num_heads, 2048
    ops = derive_block_ops(config, 1, 8, sequence_parallel=True)
    log_sum_exp = 4 * a * tokens
    assert sum(op.saved_bytes for op in ops) == Fraction(32 * h * tokens + log_sum_exp, 8)


def test_a_gated_mlp_keeps_gate_up_and_their_product() -> None:
    """Three tensors [T, F/tp], the last as the input of the down projection; silu(gate) is computed again."""
    config = load_preset("llama3-8b")
    ops = derive_model(config, Setting(1, 1024, tp=4)).block
    kept = [saved for op in ops for saved in op.saved if saved.shape == (1024, config.mlp_width // 4)]
    assert [saved.name for saved in kept] == ["gate", "up", "x"]
