"""The parameters of a model and, from the role of their module, who owns what of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.contract.plan import Column, HeadLocal, Plan, Role, Row, TokenLocal, VocabEmbedding, VocabHead
from plait.errors import ShardingError
from plait.sharding import Columns, Layout, Ownership, Split


@dataclass(frozen=True)
class Parameter:
    """A parameter, who owns what of it, and the letters of its dims."""

    ownership: Ownership
    dims: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The parameter's layout on tp."""
        own = self.ownership
        return Layout(self.dims, own.shape, own.placement, own.split)


def derive_parameter_ownership(
    name: str, shape: tuple[int, ...], role: Role | None, tp: int, *, sequence_parallel: bool
) -> Ownership:
    """Who owns what of parameter `name`, of global shape `shape`, of a module that plays `role` (None: no role).

    role              weight              bias                gradient summed by the layer over
    Column            [out/tp, in]        [out/tp]            tp/kv, where KV heads are replicated
    Row               [out, in/tp]        [out]
    VocabEmbedding    [V/tp, D]
    VocabHead         [V/tp, D]           [V/tp]
    TokenLocal        whole               whole               tp, under sequence parallelism
    """
    try:
        match role:
            case Column(cut):
                split = cut.build_split(shape[0], tp)
                return Ownership(name, shape, 0, split, "tp/kv" if split.is_replicated else None)
            case Row(cut) if len(shape) > 1:
                return Ownership(name, shape, 1, cut.build_split(shape[1], tp))
            case VocabEmbedding() | VocabHead():
                return Ownership(name, shape, 0, build_vocab_split(shape[0], tp))
            case TokenLocal() if sequence_parallel and tp > 1:
                return Ownership(name, shape, reduced_over="tp")
            case Row() | TokenLocal() | HeadLocal() | None:
                return Ownership(name, shape)
    except ShardingError as error:
        raise ShardingError(f"{name} {list(shape)}: {error.message}", hint=error.hint) from error


def build_vocab_split(vocab_size: int, tp: int) -> Split:
    """Cut the true vocabulary over tp ranks, rows of it uneven where they do not divide."""
    return Columns().build_split(vocab_size, tp)


def derive_parameters_ownership(shapes: Mapping[str, tuple[int, ...]], plan: Plan, tp: int) -> dict[str, Ownership]:
    """Who owns what of every parameter of a model whose modules play the roles of `plan`."""
    return {
        name: derive_parameter_ownership(
            name, shape, plan.resolved.get(_module_pattern(name)), tp, sequence_parallel=plan.sequence_parallel
        )
        for name, shape in shapes.items()
    }


def _module_pattern(parameter: str) -> str:
    """`layers.3.mlp.w_up.weight` -> `layers.*.mlp.w_up`."""
    module = parameter.rpartition(".")[0]
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module)


def derive_parameter_shapes(config: ModelConfig, *, blocks: Iterable[int] | None = None) -> dict[str, tuple[int, ...]]:
    """Global shape of every parameter; tied embeddings are one parameter, `embedding.weight`.

    `blocks` are the indices of the blocks that are wanted (default: all).
    """
    D, V = config.width, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, D)}
    if isinstance(config, GptConfig):
        shapes["position_embedding.weight"] = (config.max_seq_len, D)
    for index in range(config.num_layers) if blocks is None else blocks:
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _derive_block_shapes(config).items()}
    shapes |= _with_bias("norm", (D,), has_bias=isinstance(config, GptConfig))
    if not config.tied_embeddings:
        shapes["head.weight"] = (V, D)
    return shapes


def _derive_block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F = config.width, config.mlp_width
    query, kv = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    is_gpt = isinstance(config, GptConfig)
    qkv_bias = is_gpt or (isinstance(config, LlamaConfig) and config.qkv_bias)
    return (
        _with_bias("attention_norm", (D,), has_bias=is_gpt)
        | _with_bias("attention.wq", (query, D), has_bias=qkv_bias)
        | _with_bias("attention.wk", (kv, D), has_bias=qkv_bias)
        | _with_bias("attention.wv", (kv, D), has_bias=qkv_bias)
        | _with_bias("attention.wo", (D, query), has_bias=is_gpt)
        | _with_bias("mlp_norm", (D,), has_bias=is_gpt)
        | ({} if is_gpt else {"mlp.w_gate.weight": (F, D)})
        | _with_bias("mlp.w_up", (F, D), has_bias=is_gpt)
        | _with_bias("mlp.w_down", (D, F), has_bias=is_gpt)
    )


def _with_bias(module: str, shape: tuple[int, ...], *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": shape} | ({f"{module}.bias": shape[:1]} if has_bias else {})
