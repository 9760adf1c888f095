"""Gradients summed over data-parallel ranks, parameters gathered from their shards, and the optimizer's update.

    replicated    all-reduce of the gradients
    optimizer     reduce-scatter of the gradients, update of a shard, all-gather of the parameters
    parameters    (FSDP) both for every micro-batch, parameters gathered once for forward and once for backward

What overlaps still takes multiprocessors from the GEMMs above it, and the last bucket has nothing to hide beneath.
"""

from dataclasses import dataclass

from plait.config.precision import FloatFormat
from plait.contract.collective import Collective
from plait.planner.assumed import BACKWARD_WINDOW
from plait.planner.cost import Cost, Kind, build_leaf
from plait.planner.hardware import Placement
from plait.planner.laws import estimate_collective, estimate_optimizer
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import COLLECTIVE_LAWS, Circumstance, build_cost
from plait.sharding import Kind as Movement


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A collective over data-parallel ranks, `times` a step, beneath `window_s` each time."""

    name: str
    collective: Collective
    placement: Placement
    window_s: float
    times: int
    window_constants: tuple[str, ...] = (BACKWARD_WINDOW.name,)


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
    inner, outer = _place(where)
    backward_s = BACKWARD_WINDOW.value * num_layers * layers.backward.seconds
    forward_s = num_layers * layers.forward.seconds
    if plan.sharded == "nothing":
        everyone = _join(inner, outer)
        whole = _build_collective(Movement.ALL_REDUCE, everyone, num_parameters, plan.gradient_dtype)
        return [_Exchange("sum gradients", whole, everyone, backward_s, 1)]
    is_fsdp = plan.cuts("parameters")
    every = num_micro_batches if is_fsdp else 1
    scattered = num_micro_batches if plan.cuts("gradients") else 1
    gather = _build_collective(Movement.ALL_GATHER, inner, num_parameters, plan.precision.compute)
    scatter = _build_collective(Movement.REDUCE_SCATTER, inner, num_parameters, plan.gradient_dtype)
    share = -(-num_parameters // inner.degree)
    total = _build_collective(Movement.ALL_REDUCE, outer, share, plan.gradient_dtype)
    return [
        _Exchange("gather parameters", gather, inner, forward_s, every, window_constants=()),
        *([_Exchange("gather again", gather, inner, backward_s / 2, every)] if is_fsdp else []),
        _Exchange("scatter gradients", scatter, inner, backward_s / (2 if is_fsdp else 1), scattered),
        _Exchange("sum gradients", total, outer, backward_s, 1),
    ]


def _build_collective(kind: Movement, placement: Placement, numel: int, dtype: FloatFormat) -> Collective:
    return Collective(kind, "dp", placement.degree, (numel,), dtype)


def _place(where: Circumstance) -> tuple[Placement, Placement]:
    """Ranks that share the state out (those of cp too, which hold the same parameters), and copies of them."""
    plan, topology = where.plan, where.hardware.topology
    inner = topology.place(plan.cp * plan.dp_shard, plan.stride("cp"), num_devices=plan.num_devices)
    return inner, where.place("dp_replicate")


def _join(inner: Placement, outer: Placement) -> Placement:
    return Placement(inner.inside * outer.inside, inner.across * outer.across)


def _build(each: _Exchange, where: Circumstance, num_layers: int) -> list[Cost]:
    if each.placement.degree == 1:
        return []
    estimate = estimate_collective(
        where.hardware,
        COLLECTIVE_LAWS[each.collective.kind],
        each.collective.payload_bytes,
        each.collective.degree,
        placement=each.placement,
    )
    exposed_s, taxed_s, tax = estimate.seconds, 0.0, where.hardware.overlap.compute_tax
    if where.plan.overlaps_gradients:
        exposed_s = max(estimate.seconds - each.window_s, estimate.seconds / max(1, num_layers))
        taxed_s = (tax.value - 1) * (estimate.seconds - exposed_s)
    total_s = each.times * (exposed_s + taxed_s)
    domains = f"{each.placement.across} domains of {each.placement.inside}"
    note = f"{each.collective}: {where.hardware.topology.describe(each.placement)}, {domains}, {each.times} a step"
    constants = (*estimate.constants, *((tax.name, *each.window_constants) if taxed_s else ()))
    leaf = build_leaf(
        each.name, Kind.DATA_PARALLEL, total_s, estimate.uncertainty, constants=constants, note=note,
        hidden_s=max(0.0, each.times * estimate.seconds - total_s), collectives=(each.collective,) * each.times,
    )  # fmt: skip
    return [leaf]
