"""One block, and the ends of the model: every operation of the contract once, forward and backward."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from plait.config.model import ModelConfig
from plait.contract.op import Op
from plait.contract.step import list_moves
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost, Kind, join
from plait.planner.laws import estimate_loss
from plait.planner.plan_config import PlanConfig, keep_layer_axes
from plait.planner.planned import count_bytes, derive_planned_model, is_attention, is_linear
from plait.planner.prediction import HEAD
from plait.planner.step.attention import build_attention
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.elementwise import build_elementwise
from plait.planner.step.linear import Direction, build_linear


@dataclass(frozen=True)
class Layers:
    """What one micro-batch costs: a block forward and backward (with what it computes again), and both ends."""

    forward: Cost
    backward: Cost
    embedding: Cost
    head: Cost

    @cached_property
    def weights_s(self) -> float:
        """Of a block's backward the GEMMs that give gradients of weights."""
        return _count_weights(self.backward)

    @cached_property
    def head_weights_s(self) -> float:
        """Of the head those GEMMs."""
        return _count_weights(self.head)

    @property
    def block(self) -> Cost:
        """Forward and backward of one block."""
        return join("block", [self.forward, self.backward])


def build_layers(model: ModelConfig, cluster: Cluster, plan: PlanConfig, seq_len: int) -> Layers:
    """The layers of a plan; what does not change them (pp, dp and what follows from them) does not build them anew."""
    plain = keep_layer_axes(plan, dp_replicate=_stand_for_replicas(cluster, plan))
    return _build_layers(model, Cluster(cluster.hardware, 0), plain, seq_len)


@lru_cache(maxsize=16384)
def _build_layers(model: ModelConfig, cluster: Cluster, plan: PlanConfig, seq_len: int) -> Layers:
    """Nothing is built twice: what is computed again comes before the backward of the same plan without recompute."""
    where = Circumstance(cluster, plan, derive_planned_model(model, plan, seq_len))
    if plan.recompute != "none":
        plain = _build_layers(model, cluster, replace(plan, recompute="none"), seq_len)
        again = _build_again(plain.forward, where)
        return replace(plain, backward=join("backward", [*again, *plain.backward.parts]))
    flat = _build_flat(model, cluster, _flatten(cluster, plan), where.contract.setting.num_tokens)
    forward = join("forward", _build_ops(where.contract.block, flat.forward, "forward", where))
    backward = join("backward", _build_ops(where.contract.block[::-1], flat.backward, "backward", where))
    return Layers(forward, backward, _build_embedding(where), flat.head)


@dataclass(frozen=True, slots=True)
class _Flat:
    """What costs the same for as many tokens of any sequences: all but attention, and the embedding."""

    forward: Mapping[str, tuple[Cost, ...]]
    backward: Mapping[str, tuple[Cost, ...]]
    head: Cost


def _flatten(cluster: Cluster, plan: PlanConfig) -> PlanConfig:
    """The plan with all its tokens in one sequence, in a job that fits in a domain if the plan does."""
    replicas = _stand_for_replicas(cluster, plan)
    return replace(plan, micro_batch=1, cp=1, context_method="ring", dp_replicate=replicas, recompute="none")


def _stand_for_replicas(cluster: Cluster, plan: PlanConfig) -> int:
    """One number for all jobs alike: of the other axes tp and cp only see whether the job fits in a domain."""
    domain = int(cluster.hardware.topology.domain_size.value)
    return 1 if plan.num_devices <= domain else 2 * domain


@lru_cache(maxsize=4096)
def _build_flat(model: ModelConfig, cluster: Cluster, plan: PlanConfig, num_tokens: int) -> _Flat:
    where = Circumstance(cluster, plan, derive_planned_model(model, plan, num_tokens))
    block = [op for op in where.contract.block if not is_attention(op)]
    return _Flat(
        {op.name: tuple(_build_op(op, "forward", where)) for op in block},
        {op.name: tuple(_build_op(op, "backward", where)) for op in block},
        _build_head(where),
    )


def _build_ops(
    ops: tuple[Op, ...], flat: Mapping[str, tuple[Cost, ...]], direction: Direction, where: Circumstance
) -> list[Cost]:
    costs: list[Cost] = []
    for op in ops:
        if is_attention(op):
            costs += [*build_elementwise(op, direction, where), build_attention(op, direction, where)]
        else:
            costs += flat[op.name]
    return costs


def _build_op(op: Op, direction: Direction, where: Circumstance) -> list[Cost]:
    if is_linear(op):
        return [build_linear(op, direction, where), *build_elementwise(op, direction, where)]
    return [*build_elementwise(op, direction, where), *where.build_moves(list_moves(getattr(op, direction)))]


def _build_again(forward: Cost, where: Circumstance) -> list[Cost]:
    """What is computed a second time before backward: the attention core, or all of the block."""
    again = [forward]
    if where.plan.recompute == "selective":
        again = [build_attention(op, "forward", where) for op in where.contract.block if is_attention(op)]
    return [join("recompute", again)]


def _build_embedding(where: Circumstance) -> Cost:
    """Rows looked up and summed over tp; backward adds their gradients up."""
    parts: list[Cost] = []
    for op in where.contract.entry:
        size = count_bytes(op.outputs, where.contract)
        parts += [where.build_kernel("look up", 2 * size), where.build_kernel("add up", 3 * size)]
        parts += where.build_moves(list_moves((*op.forward, *op.backward)))
    return join("embedding", parts)


def _build_head(where: Circumstance) -> Cost:
    """Final norm, head, and the loss over the rank's part of the vocabulary."""
    norm, head = where.contract.exit
    loss = where.contract.loss
    parts: list[Cost] = []
    for direction in ("forward", "backward"):
        parts += build_elementwise(norm, direction, where)
        parts += where.build_moves(list_moves(getattr(norm, direction)))
        parts.append(build_linear(head, direction, where, is_head=True))
    parts.append(build_cost("loss", Kind.MEMORY_BOUND, estimate_loss(where.hardware, where.contract.num_logits)))
    return join(HEAD, [*parts, *where.build_moves(list_moves(loss.forward))])


def _count_weights(cost: Cost) -> float:
    return sum(node.seconds * times for node, times in cost.walk() if node.kind is Kind.GEMM and node.name == "wgrad")
