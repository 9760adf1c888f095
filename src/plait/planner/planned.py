"""A plan's contract: what one rank computes, moves and keeps for one micro-batch.

Shapes, FLOPs, collectives and bytes come from `plait.contract`. It has no context parallelism and no attention whose
scores are kept without dropout; what the planner adds for them is here and in `planner.step.context`:

    cp    a rank has S/cp tokens of every sequence: the contract of that length, whose attention sees cp times as many
    fp8   with a scale for each row, which no run has, linears keep a byte of each number of their inputs
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

from plait.config.conflicts import list_block_conflicts, list_unit_conflicts
from plait.config.model import GptConfig, ModelConfig
from plait.config.train import TrainConfig
from plait.contract.axis.fsdp import count_row_share
from plait.contract.block.context import derive_attention_size
from plait.contract.context.attention import AttentionSize
from plait.contract.model import ModelContract, derive_model
from plait.contract.op import Op
from plait.contract.setting import Setting, Tensor
from plait.contract.step import list_gemms
from plait.dtype import width_bytes
from plait.errors import ConfigError
from plait.planner.hardware import Hardware
from plait.planner.plan_config import PlanConfig, Quantization, build_section


class PlannedModel(ModelContract):
    """A contract whose totals are counted once, as a search asks for them again and again."""

    @cached_property
    def block_parameters(self) -> int:
        """Elements that the rank holds of a block."""
        return _count_parameters(self.block, self.setting.rank)

    @cached_property
    def entry_parameters(self) -> int:
        """Of what comes before the blocks."""
        return _count_parameters(self.entry, self.setting.rank)

    @cached_property
    def exit_parameters(self) -> int:
        """Of what comes behind them; a tied table too."""
        return _count_parameters(self.exit, self.setting.rank)

    @cached_property
    def both_ends_parameters(self) -> int:
        """Of both, a tied table once."""
        return _count_parameters((*self.entry, *self.exit), self.setting.rank)

    def count_block_share(self, degree: int) -> int:
        """Elements that each of `degree` ranks has of a block, where they share out its rows."""
        return sum(count_row_share(shape, degree) for shape in self._block_shapes)

    def count_ends_share(self, degree: int, *, has_entry: bool, has_exit: bool) -> int:
        """The same of what is around the blocks, or of one end; a tied table is one parameter."""
        held = (self._entry_shapes if has_entry else {}) | (self._exit_shapes if has_exit else {})
        return sum(count_row_share(shape, degree) for shape in held.values())

    @cached_property
    def _block_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_find_shapes(self.block, self.setting.rank).values())

    @cached_property
    def _entry_shapes(self) -> dict[str, tuple[int, ...]]:
        return _find_shapes(self.entry, self.setting.rank)

    @cached_property
    def _exit_shapes(self) -> dict[str, tuple[int, ...]]:
        return _find_shapes(self.exit, self.setting.rank)

    @cached_property
    def num_logits(self) -> int:
        """Elements of the rank's logits."""
        return prod(self.loss.inputs[0].layout.local_shape(self.setting.rank))


def derive_planned_model(model: ModelConfig, plan: PlanConfig, seq_len: int, *, rank: int = 0) -> PlannedModel:
    """What a tp rank does for one micro-batch; rank 0 has most where a cut is uneven.

    Raises:
        ConfigError: sequences that cp cannot cut.
        ShardingError: the degree cannot be realised; the message names the parameter.
    """
    if seq_len % plan.cp:
        raise ConfigError(f"sequences of {seq_len} tokens cannot be cut over cp = {plan.cp}", hint="use a divisor")
    setting = Setting(
        batch=plan.micro_batch,
        seq_len=seq_len // plan.cp,
        tp=plan.tp,
        rank=rank,
        sequence_parallel=plan.sequence_parallel,
        dtype=plan.precision.compute,
        reduce_dtype=plan.precision.reduce_dtype,
    )
    return _derive(model, setting, plan.fused_attention, plan.quantization)


@lru_cache(maxsize=4096)
def _derive(model: ModelConfig, setting: Setting, fused_attention: bool, quantization: Quantization) -> PlannedModel:
    """`setting` is without its recipe: a name is looked up faster than a section."""
    setting = replace(setting, quantization=build_section(quantization))
    return PlannedModel(**vars(derive_model(_fuse(model) if fused_attention else model, setting)))


@lru_cache(maxsize=64)
def _fuse(model: ModelConfig) -> ModelConfig:
    """Fused kernels drop probabilities without keeping any, which the contract knows as attention without dropout."""
    if isinstance(model, GptConfig) and model.attention_dropout:
        return model.model_copy(update={"attention_dropout": 0.0})
    return model


def list_recipe_problems(model: ModelConfig, hardware: Hardware, plan: PlanConfig, seq_len: int) -> list[str]:
    """What keeps a recipe from being run so: an instruction that the device lacks, blocks that a cut would tear."""
    recipe = plan.recipe
    if recipe is None or recipe.feature_unit == 1:
        return []
    problems = list_missing_instructions(hardware, plan)
    train = TrainConfig(micro_batch_size=plan.micro_batch, seq_len=seq_len // plan.cp)
    problems += [
        f"quantization = {plan.quantization}: {problem.text}"
        for problem in (
            *list_block_conflicts(model, plan.parallel, plan.section),
            *list_unit_conflicts(model, plan.parallel, plan.section, train),
        )
    ]
    return problems


def list_missing_instructions(hardware: Hardware, plan: PlanConfig) -> list[str]:
    """What of a recipe the device would have to emulate, which no law is of."""
    if plan.recipe is None or plan.recipe.feature_unit == 1 or hardware.multiplies_blocks:
        return []
    return [
        f"quantization = {plan.quantization}: {hardware.title} has no instruction for blocks that share a scale, which "
        "came with Blackwell; it would be emulated, which the planner has no rates of"
    ]


def count_bytes(tensors: Iterable[Tensor], contract: ModelContract) -> int:
    """Bytes of activations on the contract's rank."""
    setting = contract.setting
    return sum(prod(tensor.layout.local_shape(setting.rank)) for tensor in tensors) * width_bytes(setting.dtype)


def is_linear(op: Op) -> bool:
    """Whether an operation multiplies by weights."""
    return bool(op.parameters and list_gemms(op.forward))


def is_attention(op: Op) -> bool:
    """Whether an operation is the attention core."""
    return op.is_attention


def _count_parameters(ops: tuple[Op, ...], rank: int) -> int:
    held = {parameter.ownership.name: parameter for op in ops for parameter in op.parameters}
    return sum(parameter.layout.local_numel(rank) for parameter in held.values())


def _find_shapes(ops: tuple[Op, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """What tp left of each parameter, by name."""
    return {p.ownership.name: p.ownership.local_shape(rank) for op in ops for p in op.parameters}


def derive_attention(op: Op, contract: ModelContract) -> AttentionSize:
    """Heads of the rank in an attention core, and in which formats they travel where cp cuts sequences."""
    rank = contract.setting.rank
    query, kv = (x.layout.local_shape(rank)[1] for x in op.inputs[:2])
    return derive_attention_size(contract.setting, contract.config.head_width, (query, kv))
