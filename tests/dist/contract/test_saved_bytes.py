"""What a rank really keeps for backward, read off the tensors that autograd saves, is what the contract says."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.model import GptConfig, LlamaConfig
from plait.config.quantization import QuantizationConfig
from plait.contract.model import derive_model, derive_plan
from plait.contract.setting import Setting
from plait.models.registry import build_model
from plait.parallel.apply import parallelize
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.sharding import MeshShape

SIZES = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": 67, "max_seq_len": 16}
MODELS = {
    "unfused attention": GptConfig(**SIZES, dropout=0.1, attention_dropout=0.1),
    "fused attention": GptConfig(**SIZES, dropout=0.1),
    "grouped queries and gated MLP": LlamaConfig(**SIZES, num_kv_heads=2, mlp_width=31),
}
BATCH, SEQ_LEN = 3, 7
QUANTIZED = LlamaConfig(
    num_layers=3, width=64, num_heads=2, num_kv_heads=2, mlp_width=96, vocab_size=67, max_seq_len=16
)
"""Heads and columns in blocks of 32; the block in the middle is quantized."""
QUANTIZED_BATCH, QUANTIZED_SEQ_LEN = 6, 16


def _measure_saved_bytes(config: GptConfig | LlamaConfig, setting: Setting) -> int:
    """Bytes of the tensors that autograd holds between forward and backward, each once, without parameters."""
    mesh = build_mesh(MeshShape(tp=2))
    plan = derive_plan(config, sequence_parallel=setting.sequence_parallel)
    model = parallelize(build_model(config), mesh, plan, quantization=setting.quantization or "none")
    seed_dropout(model, 0)
    set_dropout_offset(model, 0)
    held: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = (torch.arange(setting.num_tokens) % config.vocab_size).view(setting.batch, setting.seq_len)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = vocab_parallel_cross_entropy(model(tokens), tokens.flatten(), mesh, vocab_size=config.vocab_size)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(tensor.nbytes for where, tensor in held.items() if where not in parameters)
    loss.backward()
    return saved


def _list_uncounted_bytes(config: GptConfig | LlamaConfig, num_tokens: int, seq_len: int = SEQ_LEN) -> list[int]:
    """What the contract leaves out, all of it small."""
    norms = 2 * config.num_layers + 1
    num_targets = 8
    if isinstance(config, LlamaConfig):
        statistics = norms * num_tokens * 4
        rope_tables = 2 * seq_len * config.head_width * 4
        return [statistics, rope_tables, num_targets]
    causal_masks = config.num_layers * seq_len**2 if config.attention_dropout else 0
    statistics = norms * num_tokens * 2 * 4
    return [statistics, causal_masks, num_targets]


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("model_name", MODELS)
def test_autograd_keeps_what_the_contract_says(
    ranks: Callable[[int], LocalRanks], model_name: str, sequence_parallel: bool
) -> None:
    """To the byte, on either rank of an uneven split of 21 tokens, 67 rows of vocabulary and 31 columns."""
    config = MODELS[model_name]
    setting = Setting(BATCH, SEQ_LEN, 2, sequence_parallel=sequence_parallel, dtype="float32")
    measured = ranks(2).call(_measure_saved_bytes, config=config, setting=setting)
    for rank in range(2):
        setting = replace(setting, rank=rank)
        own_tokens = setting.token_split.lengths[rank] if sequence_parallel else setting.num_tokens
        promised = sum(op.saved_bytes for op in derive_model(config, setting).ops)
        assert measured[rank] == promised + sum(_list_uncounted_bytes(config, own_tokens))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("recipe", ["fp8_currentscaling", "mxfp8", "nvfp4"])
def test_of_a_quantized_input_its_bytes_are_kept(
    ranks: Callable[[int], LocalRanks], recipe: str, sequence_parallel: bool
) -> None:
    """To the byte, on either rank of three blocks of tokens and of columns; as wgrad reads it, and nothing beside."""
    quantization = QuantizationConfig.model_validate(recipe)
    setting = Setting(
        QUANTIZED_BATCH,
        QUANTIZED_SEQ_LEN,
        2,
        sequence_parallel=sequence_parallel,
        dtype="float32",
        quantization=quantization,
    )
    measured = ranks(2).call(_measure_saved_bytes, config=QUANTIZED, setting=setting)
    for rank in range(2):
        setting = replace(setting, rank=rank)
        own_tokens = setting.token_split.lengths[rank] if sequence_parallel else setting.num_tokens
        promised = sum(op.saved_bytes for op in derive_model(QUANTIZED, setting).ops)
        assert measured[rank] == promised + sum(_list_uncounted_bytes(QUANTIZED, own_tokens, setting.seq_len))
