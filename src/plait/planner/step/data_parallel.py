"""Gradients summed over data-parallel ranks, parameters gathered from their shards, and the optimizer's update.

    replicated    all-reduce of the gradients
    optimizer     reduce-scatter of the gradients, update of a shard, all-gather of the parameters
    parameters    (FSDP) both for every micro-batch, parameters gathered once for forward and once for backward

What overlaps still takes multiprocessors from the GEMMs above it, and the last bucket has nothing to hide beneath.
"""

from dataclasses import dataclass

from plait.dtype import width_bytes
from plait.planner.assumed import BACKWARD_WINDOW
from plait.planner.cost import Cost, Kind, build_leaf
from plait.planner.hardware import Placement
from plait.planner.laws import Estimate, estimate_collective, estimate_optimizer
from plait.planner.laws.collective import CollectiveKind
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import Circumstance, build_cost


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A collective over data-parallel ranks, `times` a step, beneath `window_s` each time."""

    name: str
    kind: CollectiveKind
    payload_bytes: float
    placement: Placement
    window_s: float
    times: int


def build_data_parallel(
    layers: Layers, where: Circumstance, num_parameters: int, num_layers: int, num_micro_batches: int
) -> list[Cost]:
    """What data parallelism adds to a step of a rank with so many parameters in so many blocks."""
    exchanges = _list_exchanges(layers, where, num_parameters, (num_layers, num_micro_batches))
    return [cost for each in exchanges for cost in _build(each, where, num_layers)]


def build_optimizer(where: Circumstance, num_parameters: int) -> Cost:
    """The update of the rank's share."""
    estimate = estimate_optimizer(where.hardware, num_parameters / where.plan.sharding_degree)
    return build_cost("optimizer", Kind.OPTIMIZER, estimate)


def _list_exchanges(
    layers: Layers, where: Circumstance, num_parameters: int, counts: tuple[int, int]
) -> list[_Exchange]:
    plan, (num_layers, num_micro_batches) = where.plan, counts
    gradients = num_parameters * width_bytes(plan.gradient_dtype)
    weights = num_parameters * width_bytes(plan.precision.compute)
    inner, outer = _place(where)
    backward_s = BACKWARD_WINDOW.value * num_layers * layers.backward.seconds
    forward_s = num_layers * layers.forward.seconds
    if plan.sharded == "nothing":
        everyone = _join(inner, outer)
        return [_Exchange("sum gradients", "all_reduce", gradients, everyone, backward_s, 1)]
    is_fsdp = plan.sharded == "parameters"
    every = num_micro_batches if is_fsdp else 1
    scattered = num_micro_batches if plan.sharded in ("gradients", "parameters") else 1
    return [
        _Exchange("gather parameters", "all_gather", weights, inner, forward_s, every),
        *([_Exchange("gather again", "all_gather", weights, inner, backward_s / 2, every)] if is_fsdp else []),
        _Exchange(
            "scatter gradients", "reduce_scatter", gradients, inner, backward_s / (2 if is_fsdp else 1), scattered
        ),
        _Exchange("sum gradients", "all_reduce", gradients / inner.degree, outer, backward_s, 1),
    ]


def _place(where: Circumstance) -> tuple[Placement, Placement]:
    """Ranks that share the state out (those of cp too, which hold the same parameters), and copies of them."""
    plan, cluster = where.plan, where.cluster
    topology = where.hardware.topology
    stride = min(cluster.stride("cp", plan), cluster.stride("dp_shard", plan))
    inner = topology.place(plan.cp * plan.dp_shard, stride, num_devices=plan.num_devices)
    outer = topology.place(plan.dp_replicate, cluster.stride("dp_replicate", plan), num_devices=plan.num_devices)
    return inner, outer


def _join(inner: Placement, outer: Placement) -> Placement:
    return Placement(inner.inside * outer.inside, inner.across * outer.across)


def _build(each: _Exchange, where: Circumstance, num_layers: int) -> list[Cost]:
    degree = each.placement.degree
    if degree == 1:
        return []
    estimate = estimate_collective(where.hardware, each.kind, each.payload_bytes, degree, placement=each.placement)
    exposed_s = estimate.seconds
    taxed_s = 0.0
    if where.plan.overlaps_gradients:
        exposed_s = max(estimate.seconds - each.window_s, estimate.seconds / max(1, num_layers))
        taxed_s = (where.hardware.overlap.compute_tax.value - 1) * (estimate.seconds - exposed_s)
    total_s = each.times * (exposed_s + taxed_s)
    leaf = _build_leaf(each, estimate, total_s)
    return [leaf.hiding(max(0.0, each.times * estimate.seconds - total_s))]


def _build_leaf(each: _Exchange, estimate: Estimate, seconds: float) -> Cost:
    where = f"{each.placement.degree} ranks over {each.placement.across} domains"
    note = f"{each.kind} of {each.payload_bytes / 1e9:.2f} GB, {where}, {each.times} a step"
    return build_leaf(each.name, Kind.DATA_PARALLEL, seconds, estimate.uncertainty, estimate.constants, note=note)
