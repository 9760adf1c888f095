"""Gradients summed over data-parallel ranks, parameters gathered from their shards, and the optimizer's update.

    replicated    all-reduce of the gradients
    optimizer     reduce-scatter of the gradients, update of a shard, all-gather of the parameters
    parameters    (FSDP) each block gathered for forward and again for backward, for every micro-batch, and what is
                  around the blocks once; their gradients reduced in the last micro-batch. Stages of a pipeline are
                  gathered before a step's first pass, and reduced behind its last (`contract.axis.fsdp`)

What overlaps still takes multiprocessors from the GEMMs above it, and the last bucket has nothing to hide beneath.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.config.precision import FloatFormat
from plait.contract.axis.fsdp import Unit, build_unit
from plait.contract.collective import Collective
from plait.planner.assumed import BACKWARD_WINDOW
from plait.planner.cost import Cost, Kind, build_leaf, join
from plait.planner.hardware import Placement
from plait.planner.laws import estimate_collective, estimate_optimizer
from plait.planner.memory.static import count_stage_parameters
from plait.planner.stages import Stage
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import COLLECTIVE_LAWS, Circumstance, build_cost
from plait.sharding import Kind as Movement


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Collectives over data-parallel ranks, `number` of them beneath `window_s`, and all that `times` a step.

    Attributes:
        buckets: in how many parts they are issued, as what they move is needed, or there.
    """

    name: str
    collective: Collective
    placement: Placement
    window_s: float
    times: int
    buckets: int
    number: int = 1
    window_constants: tuple[str, ...] = (BACKWARD_WINDOW.name,)


def build_data_parallel(layers: Layers, where: Circumstance, stage: Stage) -> list[Cost]:
    """What data parallelism adds to a step of a rank that has this of the model."""
    listed = _list_unit_exchanges if where.plan.gathers_units else _list_exchanges
    return [cost for each in listed(layers, where, stage) for cost in _build(each, where)]


def build_optimizer(where: Circumstance, stage: Stage) -> Cost:
    """The update of the rank's share."""
    num_parameters = count_stage_parameters(where.contract, stage)
    estimate = estimate_optimizer(where.hardware, num_parameters / where.plan.sharding_degree)
    return build_cost("optimizer", Kind.OPTIMIZER, estimate)


def _list_exchanges(layers: Layers, where: Circumstance, stage: Stage) -> Iterator[_Exchange]:
    plan, num_parameters = where.plan, count_stage_parameters(where.contract, stage)
    inner, outer = _place(where)
    backward_s = BACKWARD_WINDOW.value * stage.num_layers * layers.backward.seconds
    buckets = max(1, stage.num_layers)
    if not plan.cuts("optimizer"):
        everyone = _join(inner, outer)
        whole = _build_collective(Movement.ALL_REDUCE, everyone, num_parameters, plan.summed_dtype)
        yield _Exchange("sum gradients", whole, everyone, backward_s, 1, buckets)
        return
    scattered = stage.num_micro_batches if plan.cuts("gradients") else 1
    gather = _build_collective(Movement.ALL_GATHER, inner, num_parameters, plan.precision.compute)
    scatter = _build_collective(Movement.REDUCE_SCATTER, inner, num_parameters, plan.summed_dtype)
    share = -(-num_parameters // inner.degree)
    total = _build_collective(Movement.ALL_REDUCE, outer, share, plan.summed_dtype)
    forward_s = stage.num_layers * layers.forward.seconds
    yield _Exchange("gather parameters", gather, inner, forward_s, 1, buckets, window_constants=())
    yield _Exchange("scatter gradients", scatter, inner, backward_s, scattered, buckets)
    yield _Exchange("sum gradients", total, outer, backward_s, 1, buckets)


def _list_unit_exchanges(layers: Layers, where: Circumstance, stage: Stage) -> Iterator[_Exchange]:
    """Those of the blocks, beneath others, and of what is around them, which all wait for, as they do in a pipeline."""
    block, root = _build_units(where, stage)
    is_whole, number = where.plan.pp > 1, stage.num_layers
    passes = 1 if is_whole else stage.num_micro_batches
    forward_s, backward_s = (0.0 if is_whole else number * each.seconds for each in (layers.forward, layers.backward))
    yield from _list_moves("gather around blocks", root.gather, where, 0.0, passes)
    yield from _list_moves("gather blocks", block.gather, where, forward_s, passes, number, window_constants=())
    if not is_whole:
        # In the last of its passes backward has gradients to move beside.
        backward_s *= BACKWARD_WINDOW.value
        yield from _list_moves("gather again", block.gather, where, backward_s, passes - 1, number)
        yield from _list_moves("gather beside gradients", block.gather, where, backward_s / 2, 1, number)
    yield from _list_moves("reduce blocks", block.reduce, where, backward_s / 2, 1, number)
    yield from _list_moves("reduce around blocks", root.reduce, where, 0.0, 1)


def _build_units(where: Circumstance, stage: Stage) -> tuple[Unit, Unit]:
    """A block, and what the stage has around its blocks."""
    plan, contract = where.plan, where.contract
    shape = plan.mesh_shape
    degree = shape.degree("dp_shard_cp")
    ends = contract.count_ends_share(degree, has_entry=stage.is_first, has_exit=stage.is_last)
    block, root = (
        build_unit(shape, share, gathered=plan.precision.compute, summed=plan.summed_dtype)
        for share in (contract.count_block_share(degree), ends)
    )
    return block, root


def _list_moves(
    name: str,
    moves: tuple[Collective, ...],
    where: Circumstance,
    window_s: float,
    times: int,
    number: int = 1,
    window_constants: tuple[str, ...] = (BACKWARD_WINDOW.name,),
) -> Iterator[_Exchange]:
    inner, outer = _place(where)
    for each in moves:
        is_of_copies = each.axis == "dp_replicate"
        yield _Exchange(
            f"{name} over copies" if is_of_copies else name, each, outer if is_of_copies else inner, window_s, times,
            buckets=max(1, number), number=number, window_constants=window_constants,
        )  # fmt: skip


def _build_collective(kind: Movement, placement: Placement, numel: int, dtype: FloatFormat) -> Collective:
    return Collective(kind, "dp", placement.degree, (numel,), dtype)


def _place(where: Circumstance) -> tuple[Placement, Placement]:
    """Ranks that share the state out (those of cp too, which hold the same parameters), and copies of them."""
    plan, topology = where.plan, where.hardware.topology
    inner = topology.place(plan.cp * plan.dp_shard, plan.stride("cp"), num_devices=plan.num_devices)
    return inner, where.place("dp_replicate")


def _join(inner: Placement, outer: Placement) -> Placement:
    return Placement(inner.inside * outer.inside, inner.across * outer.across)


def _build(each: _Exchange, where: Circumstance) -> list[Cost]:
    """One of its collectives, as often as it is issued."""
    count = each.times * each.number
    if each.placement.degree == 1 or not count:
        return []
    estimate = estimate_collective(
        where.hardware,
        COLLECTIVE_LAWS[each.collective.kind],
        each.collective.payload_bytes,
        each.collective.degree,
        placement=each.placement,
    )
    moved_s, taxed_s, tax = each.number * estimate.seconds, 0.0, where.hardware.overlap.compute_tax
    exposed_s = moved_s
    if where.plan.overlaps_gradients:
        exposed_s = max(moved_s - each.window_s, moved_s / each.buckets)
        taxed_s = (tax.value - 1) * (moved_s - exposed_s)
    one_s = (exposed_s + taxed_s) / each.number
    domains = f"{each.placement.across} domains of {each.placement.inside}"
    note = f"{each.collective}: {where.hardware.topology.describe(each.placement)}, {domains}, {count} a step"
    constants = (*estimate.constants, *((tax.name, *each.window_constants) if taxed_s else ()))
    leaf = build_leaf(
        each.name, Kind.DATA_PARALLEL, one_s, estimate.uncertainty, constants=constants, note=note,
        hidden_s=max(0.0, estimate.seconds - one_s), collectives=(each.collective,),
    )  # fmt: skip
    return [leaf if count == 1 else join(each.name, [leaf], times=count)]
