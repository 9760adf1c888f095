"""Our models as a whole: which module plays which role, who owns which parameter, what a rank does in a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import Recipe
from plait.contract.block import derive_block
from plait.contract.collective import Collective
from plait.contract.embedding import derive_position_embedding, derive_vocab_embedding
from plait.contract.linear import LinearParameters, derive_column_group
from plait.contract.loss import derive_cross_entropy
from plait.contract.norm import derive_dropout, derive_norm
from plait.contract.op import Op
from plait.contract.parameter import Parameter, derive_parameters_ownership
from plait.contract.plan import (
    Activation,
    AttentionCore,
    Column,
    HeadLocal,
    Plan,
    Positions,
    Role,
    Row,
    TokenLocal,
    VocabEmbedding,
    VocabHead,
)
from plait.contract.quantization import align_plan, is_block_selected, is_wanted, select_linears
from plait.contract.recompute import list_backward
from plait.contract.setting import Setting
from plait.contract.step import list_collectives
from plait.sharding import KeyValueHeads, Ownership, QueryHeads


def derive_plan(
    config: ModelConfig, *, sequence_parallel: bool = True, quantization: QuantizationConfig | None = None
) -> Plan:
    """Roles of the modules of our Llama and GPT models; where linears are quantized in blocks none of them is cut."""
    heads = (config.num_heads, config.num_kv_heads, config.head_width)
    query, key_value = QueryHeads(*heads), KeyValueHeads(*heads)
    widening = "gate_up" if isinstance(config, LlamaConfig) else "up"
    roles: dict[str, Role | str] = {
        "embedding": VocabEmbedding(),
        "positions": Positions(),
        "layers.*.attention_norm": TokenLocal(),
        "layers.*.attention.wq": Column(query, group="qkv"),
        "layers.*.attention.wk": Column(key_value, group="qkv"),
        "layers.*.attention.wv": Column(key_value, group="qkv"),
        "layers.*.attention.core": AttentionCore(),
        "layers.*.attention.wo": Row(query),
        "layers.*.mlp_norm": TokenLocal(),
        "layers.*.mlp.w_up": Column(group=widening),
        "layers.*.mlp.activation": Activation(widening),
        "layers.*.mlp.w_down": Row(),
        "norm": TokenLocal(),
        "head": VocabHead(),
    }
    if isinstance(config, LlamaConfig):
        roles["layers.*.mlp.w_gate"] = Column(group=widening)
    else:
        roles["position_embedding"] = TokenLocal()
        roles["embedding_dropout"] = TokenLocal()
        roles["layers.*.attention.dropout"] = HeadLocal(query)
        roles["layers.*.attention_dropout"] = TokenLocal()
        roles["layers.*.mlp_dropout"] = TokenLocal()
    plan, recipe = Plan(roles, sequence_parallel), None if quantization is None else quantization.resolved
    return plan if recipe is None else align_plan(plan, recipe)


def derive_recipes(config: ModelConfig, quantization: QuantizationConfig) -> dict[str, Recipe]:
    """By module, what holds for each linear that is quantized.

    Raises:
        ConfigError: no linear is left to quantize.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in derive_parameter_shapes(config)) | {"head": None}
    plan = derive_plan(config)
    roles = {module: role for module in modules if (role := plan.role_of(module)) is not None}
    return select_linears(quantization, roles, config.num_layers)


def derive_ownership(
    config: ModelConfig,
    tp: int,
    *,
    sequence_parallel: bool = True,
    quantization: QuantizationConfig | None = None,
) -> dict[str, Ownership]:
    """Who owns what of every parameter, by fully qualified name in the order of the module tree.

    Raises:
        ShardingError: `tp` cannot be realised; the message names the parameter.
    """
    plan = derive_plan(config, sequence_parallel=sequence_parallel, quantization=quantization)
    return derive_parameters_ownership(derive_parameter_shapes(config), plan, tp)


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


@dataclass(frozen=True)
class ModelContract:
    """A model on one rank: operations before the blocks, those of a block, those after, and the loss.

    Attributes:
        block: what all blocks promise, or all but those that are kept in high precision; this is one of them.
        kept_block: what a block promises that is kept; the same where nothing is quantized.
    """

    config: ModelConfig
    setting: Setting
    entry: tuple[Op, ...]
    block: tuple[Op, ...]
    kept_block: tuple[Op, ...]
    exit: tuple[Op, ...]
    loss: Op

    def is_kept(self, index: int) -> bool:
        """Whether block `index` stays in high precision where others are quantized."""
        quantization = self.setting.quantization
        if quantization is None or quantization.resolved is None:
            return False
        return not is_block_selected(quantization, index, self.config.num_layers)

    def find_block(self, index: int) -> tuple[Op, ...]:
        """The operations of block `index`."""
        return self.kept_block if self.is_kept(index) else self.block

    @property
    def blocks(self) -> tuple[tuple[Op, ...], ...]:
        """The operations of every block in order, all under the name of one."""
        return tuple(map(self.find_block, range(self.config.num_layers)))

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every operation in the order of forward, the loss last; blocks all under the name of one."""
        return (*self.entry, *(op for block in self.blocks for op in block), *self.exit, self.loss)

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters that the rank holds, a tied one once."""
        ends = {p.ownership.name: p for op in (*self.entry, *self.exit) for p in op.parameters}
        block = [p for op in self.block for p in op.parameters]
        held = (p.layout.local_numel(self.setting.rank) for p in (*ends.values(), *block * self.config.num_layers))
        return sum(held)

    @cached_property
    def micro_batch_collectives(self) -> tuple[Collective, ...]:
        """What the rank issues in one forward, loss and backward, in order."""
        return (*self.forward_collectives, *self.loss_collectives, *self.backward_collectives)

    @cached_property
    def forward_collectives(self) -> tuple[Collective, ...]:
        """What the rank issues from tokens to logits, in order."""
        return tuple(collective for op in self.ops[:-1] for collective in list_collectives(op.forward))

    @cached_property
    def loss_collectives(self) -> tuple[Collective, ...]:
        """What the rank issues from logits to loss, in order."""
        return tuple(list_collectives(self.loss.forward))

    @cached_property
    def backward_collectives(self) -> tuple[Collective, ...]:
        """What the rank issues from loss to parameter gradients, in order: the operations of forward in reverse."""
        parts = [self.entry, *self.blocks, (*self.exit, self.loss)]
        return tuple(
            collective
            for part in reversed(parts)
            for collective in list_collectives(list_backward(part, self.setting.recompute))
        )


def derive_model(
    config: ModelConfig, setting: Setting, *, block: int = 0, label_smoothing: bool = False
) -> ModelContract:
    """What one rank does for one micro-batch; `block` is the one whose names stand for all.

    Raises:
        ShardingError: the degree cannot be realised; the message names the parameter.
    """
    plan = derive_plan(config, sequence_parallel=setting.sequence_parallel, quantization=setting.quantization)
    ownership = derive_parameters_ownership(derive_parameter_shapes(config, blocks=[block]), plan, setting.tp)
    recipes = _select_recipes(setting, plan, ownership)
    table = ownership["embedding.weight" if config.tied_embeddings else "head.weight"]
    head = LinearParameters("head", Parameter(table, ("V", "D")), recipe=recipes.get("head"))
    entry = [derive_vocab_embedding(setting, ownership, "embedding")]
    if isinstance(config, GptConfig):
        entry.append(derive_position_embedding(setting, ownership, "position_embedding"))
        if config.dropout:
            entry.append(derive_dropout(setting, "embedding_dropout", config.width))
    return ModelContract(
        config=config,
        setting=setting,
        entry=tuple(entry),
        block=derive_block(config, setting, ownership, recipes, block),
        kept_block=derive_block(config, setting, ownership, {}, block),
        exit=(derive_norm(setting, ownership, "norm"), derive_column_group(setting, (head,))),
        loss=derive_cross_entropy(setting, head.cut, label_smoothing=label_smoothing),
    )


def _select_recipes(setting: Setting, plan: Plan, ownership: Mapping[str, Ownership]) -> dict[str, Recipe]:
    """By module, those of linears that are quantized where their block is not kept."""
    recipe, quantization = setting.recipe, setting.quantization
    if recipe is None or quantization is None:
        return {}
    modules = {*(name.rpartition(".")[0] for name in ownership), "head"}
    return {module: recipe for module in modules if is_wanted(quantization, module, plan.role_of(module))}
