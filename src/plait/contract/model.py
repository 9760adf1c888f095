"""Our models as a whole: which module plays which role, and who owns which parameter."""

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.contract.parameter import derive_parameters_ownership
from plait.contract.plan import Column, HeadLocal, Plan, Role, Row, TokenLocal, VocabEmbedding, VocabHead
from plait.sharding import KeyValueHeads, Ownership, QueryHeads


def derive_plan(config: ModelConfig, *, sequence_parallel: bool = True) -> Plan:
    """Roles of the modules of our Llama and GPT models."""
    heads = (config.num_heads, config.num_kv_heads, config.head_width)
    query, key_value = QueryHeads(*heads), KeyValueHeads(*heads)
    roles: dict[str, Role | str] = {
        "embedding": VocabEmbedding(),
        "layers.*.attention_norm": TokenLocal(),
        "layers.*.attention.wq": Column(query, group="qkv"),
        "layers.*.attention.wk": Column(key_value, group="qkv"),
        "layers.*.attention.wv": Column(key_value, group="qkv"),
        "layers.*.attention.wo": Row(query),
        "layers.*.mlp_norm": TokenLocal(),
        "layers.*.mlp.w_up": Column(group="gate_up") if isinstance(config, LlamaConfig) else Column(),
        "layers.*.mlp.w_down": Row(),
        "norm": TokenLocal(),
        "head": VocabHead(),
    }
    if isinstance(config, LlamaConfig):
        roles["layers.*.mlp.w_gate"] = Column(group="gate_up")
    else:
        roles["position_embedding"] = TokenLocal()
        roles["embedding_dropout"] = TokenLocal()
        roles["layers.*.attention.dropout"] = HeadLocal(query)
        roles["layers.*.attention_dropout"] = TokenLocal()
        roles["layers.*.mlp_dropout"] = TokenLocal()
    return Plan(roles, sequence_parallel)


def derive_ownership(config: ModelConfig, tp: int, *, sequence_parallel: bool = True) -> dict[str, Ownership]:
    """Who owns what of every parameter, by fully qualified name in the order of the module tree.

    Raises:
        ShardingError: `tp` cannot be realised; the message names the parameter.
    """
    plan = derive_plan(config, sequence_parallel=sequence_parallel)
    return derive_parameters_ownership(derive_parameter_shapes(config), plan, tp)


def derive_parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every parameter; tied embeddings are one parameter, `embedding.weight`."""
    D, V = config.width, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (V, D)}
    if isinstance(config, GptConfig):
        shapes["position_embedding.weight"] = (config.max_seq_len, D)
    for index in range(config.num_layers):
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
