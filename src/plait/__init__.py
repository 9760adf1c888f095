"""Tensor-sequence parallelism for PyTorch, with the collectives plaited into the GEMMs.

`import plait` never imports torch: every public name is looked up on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.comm.mesh import build_mesh as build_mesh
    from plait.contract.plan import (
        Column as Column,
        HeadLocal as HeadLocal,
        Plan as Plan,
        Row as Row,
        TokenLocal as TokenLocal,
        VocabEmbedding as VocabEmbedding,
        VocabHead as VocabHead,
    )
    from plait.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        ContractError as ContractError,
        PlaitError as PlaitError,
        ShardingError as ShardingError,
        TransportError as TransportError,
        TransportTimeout as TransportTimeout,
        VerificationError as VerificationError,
    )
    from plait.parallel.apply import parallelize as parallelize
    from plait.parallel.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from plait.parallel.loss import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
        vocab_parallel_entropy as vocab_parallel_entropy,
        vocab_parallel_log_prob as vocab_parallel_log_prob,
    )
    from plait.parallel.tokens import gather_tokens as gather_tokens, shard_tokens as shard_tokens
    from plait.sharding.mesh import MeshShape as MeshShape

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "plait.comm.mesh": ("build_mesh",),
    "plait.contract.plan": ("Column", "HeadLocal", "Plan", "Row", "TokenLocal", "VocabEmbedding", "VocabHead"),
    "plait.errors": (
        "CheckpointError",
        "ConfigError",
        "ContractError",
        "PlaitError",
        "ShardingError",
        "TransportError",
        "TransportTimeout",
        "VerificationError",
    ),
    "plait.parallel.apply": ("parallelize",),
    "plait.parallel.grad_norm": ("clip_grad_norm_",),
    "plait.parallel.loss": ("vocab_parallel_cross_entropy", "vocab_parallel_entropy", "vocab_parallel_log_prob"),
    "plait.parallel.tokens": ("gather_tokens", "shard_tokens"),
    "plait.sharding.mesh": ("MeshShape",),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = ["__version__", *_MODULE_BY_NAME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
