"""Tensor-sequence parallelism for PyTorch, with the collectives plaited into the GEMMs.

`import plait` never imports torch: every public name is looked up on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.comm.launch import LocalRanks
    from plait.comm.mesh.build import build_mesh
    from plait.config.axis.context import ContextConfig
    from plait.config.overlap import OverlapConfig
    from plait.config.quantization import QuantizationConfig
    from plait.contract.plan import (
        Activation,
        AttentionCore,
        Column,
        FeatureNorm,
        HeadLocal,
        HeadRows,
        InnerColumn,
        InRegion,
        Plan,
        Positions,
        Row,
        TokenLocal,
        VocabEmbedding,
        VocabHead,
        Whole,
    )
    from plait.errors import (
        CheckpointError,
        ConfigError,
        ContractError,
        PlaitError,
        ShardingError,
        TransportError,
        TransportTimeout,
        VerificationError,
    )
    from plait.hf.load import load_pretrained
    from plait.hf.parallelize import parallelize
    from plait.hf.plan import plan_for
    from plait.hf.save import save_pretrained
    from plait.models.activation import Gelu, SwiGLU
    from plait.parallel.apply import enter_sequences, mesh_of, ownership_of, receipt_of
    from plait.parallel.context.core import CausalAttention
    from plait.parallel.context.sequences import TokenPositions, take_own_tokens
    from plait.parallel.dropout import seed_dropout, set_dropout_offset
    from plait.parallel.grad_norm import clip_grad_norm_
    from plait.parallel.loss import vocab_parallel_cross_entropy, vocab_parallel_entropy, vocab_parallel_log_prob
    from plait.parallel.precision.model import update_amax_history
    from plait.parallel.shard import gather_tensor
    from plait.parallel.tokens import gather_tokens, shard_tokens
    from plait.sharding.cut import Columns, KeyValueHeads, QueryHeads
    from plait.sharding.mesh import MeshShape

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AttentionCore",
    "CausalAttention",
    "CheckpointError",
    "Column",
    "Columns",
    "ConfigError",
    "ContextConfig",
    "ContractError",
    "FeatureNorm",
    "Gelu",
    "HeadLocal",
    "HeadRows",
    "InRegion",
    "InnerColumn",
    "KeyValueHeads",
    "LocalRanks",
    "MeshShape",
    "OverlapConfig",
    "PlaitError",
    "Plan",
    "Positions",
    "QuantizationConfig",
    "QueryHeads",
    "Row",
    "ShardingError",
    "SwiGLU",
    "TokenLocal",
    "TokenPositions",
    "TransportError",
    "TransportTimeout",
    "VerificationError",
    "VocabEmbedding",
    "VocabHead",
    "Whole",
    "__version__",
    "build_mesh",
    "clip_grad_norm_",
    "enter_sequences",
    "gather_tensor",
    "gather_tokens",
    "load_pretrained",
    "mesh_of",
    "ownership_of",
    "parallelize",
    "plan_for",
    "receipt_of",
    "save_pretrained",
    "seed_dropout",
    "set_dropout_offset",
    "shard_tokens",
    "take_own_tokens",
    "update_amax_history",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_log_prob",
]

_MODULES = {
    "LocalRanks": "plait.comm.launch",
    "build_mesh": "plait.comm.mesh.build",
    "ContextConfig": "plait.config.axis.context",
    "OverlapConfig": "plait.config.overlap",
    "QuantizationConfig": "plait.config.quantization",
    "Activation": "plait.contract.plan",
    "AttentionCore": "plait.contract.plan",
    "Column": "plait.contract.plan",
    "FeatureNorm": "plait.contract.plan",
    "HeadLocal": "plait.contract.plan",
    "HeadRows": "plait.contract.plan",
    "InRegion": "plait.contract.plan",
    "InnerColumn": "plait.contract.plan",
    "Plan": "plait.contract.plan",
    "Positions": "plait.contract.plan",
    "Row": "plait.contract.plan",
    "TokenLocal": "plait.contract.plan",
    "VocabEmbedding": "plait.contract.plan",
    "VocabHead": "plait.contract.plan",
    "Whole": "plait.contract.plan",
    "CheckpointError": "plait.errors",
    "ConfigError": "plait.errors",
    "ContractError": "plait.errors",
    "PlaitError": "plait.errors",
    "ShardingError": "plait.errors",
    "TransportError": "plait.errors",
    "TransportTimeout": "plait.errors",
    "VerificationError": "plait.errors",
    "parallelize": "plait.hf.parallelize",
    "load_pretrained": "plait.hf.load",
    "plan_for": "plait.hf.plan",
    "save_pretrained": "plait.hf.save",
    "Gelu": "plait.models.activation",
    "SwiGLU": "plait.models.activation",
    "enter_sequences": "plait.parallel.apply",
    "mesh_of": "plait.parallel.apply",
    "ownership_of": "plait.parallel.apply",
    "receipt_of": "plait.parallel.apply",
    "CausalAttention": "plait.parallel.context.core",
    "TokenPositions": "plait.parallel.context.sequences",
    "take_own_tokens": "plait.parallel.context.sequences",
    "seed_dropout": "plait.parallel.dropout",
    "set_dropout_offset": "plait.parallel.dropout",
    "clip_grad_norm_": "plait.parallel.grad_norm",
    "vocab_parallel_cross_entropy": "plait.parallel.loss",
    "vocab_parallel_entropy": "plait.parallel.loss",
    "vocab_parallel_log_prob": "plait.parallel.loss",
    "update_amax_history": "plait.parallel.precision.model",
    "gather_tensor": "plait.parallel.shard",
    "gather_tokens": "plait.parallel.tokens",
    "shard_tokens": "plait.parallel.tokens",
    "Columns": "plait.sharding.cut",
    "KeyValueHeads": "plait.sharding.cut",
    "QueryHeads": "plait.sharding.cut",
    "MeshShape": "plait.sharding.mesh",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
