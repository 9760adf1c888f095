"""What a rank issues in an optimizer step of a Hugging Face model, over every axis but tp.

Where tensors are cut over tp follows from the sources of each architecture. All other axes are as for our own models:
attention brings tokens together over cp, layers are units of FSDP, and what closes a step is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from plait.config.run import FineTuneConfig
from plait.contract.axis.fsdp import Unit, build_unit, count_share
from plait.contract.axis.totals import derive_totals, find_sums
from plait.contract.collective import Collective
from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan, build_plan
from plait.contract.context.mask import CAUSAL, AttentionMask
from plait.contract.context.traffic import ContextTraffic, derive_context_traffic
from plait.contract.step import REDUCE
from plait.sharding import Ownership
from plait.sharding.token_order import Order, build_order


@dataclass(frozen=True)
class Owned:
    """A parameter, and whether it is trained."""

    ownership: Ownership
    is_trained: bool


@dataclass(frozen=True)
class Layer:
    """What there is to know of one layer.

    Attributes:
        window: of its attention; None sees everything before it.
        attention: heads of one tp rank.
    """

    window: int | None
    attention: AttentionSize
    parameters: tuple[Owned, ...]


@dataclass(frozen=True)
class Directory:
    """A model on the ranks at one place of tp: its layers in the order of forward, and what is around them."""

    layers: tuple[Layer, ...]
    ends: tuple[Owned, ...]
    tp_rank: int

    @property
    def trained(self) -> list[Ownership]:
        """Everything that has a gradient."""
        owned = [*(each for layer in self.layers for each in layer.parameters), *self.ends]
        return [each.ownership for each in owned if each.is_trained]


def derive_attention_plan(run: FineTuneConfig, layer: Layer, mask: AttentionMask) -> ContextPlan:
    """What sees what in a layer, of what `mask` lets it see, and which rank has which tokens."""
    order = build_order(Order(run.context.order), run.seq_len, run.parallel.cp)
    return build_plan(order, replace(mask, window=layer.window), run.train.micro_batch_size)


def derive_directory_collectives(
    run: FineTuneConfig, model: Directory, masks: Sequence[AttentionMask] = ()
) -> tuple[Collective, ...]:
    """In order; what it issues over tp lies in between. `masks` are those of its micro-batches, where they differ."""
    units = _Units(run, model)
    issued: list[Collective] = []
    masks = masks or (CAUSAL,) * run.train.gradient_accumulation
    for index, mask in enumerate(masks):
        traffic = [_derive_traffic(run, layer, mask) for layer in model.layers]
        issued += _list_forward(traffic, units)
        issued += _list_backward(run, traffic, units, is_last=index + 1 == len(masks))
    totals = [each for each in derive_totals(run) if each.axis != "tp"]
    return (*issued, *totals, *_list_sums(run, model))


class _Units:
    """The units of FSDP: each layer, and all around them; nothing where every rank holds all."""

    def __init__(self, run: FineTuneConfig, model: Directory) -> None:
        self.layers = [_derive_unit(run, layer.parameters, model.tp_rank) for layer in model.layers]
        self.ends = _derive_unit(run, model.ends, model.tp_rank)
        self.gathers_again = run.parallel.frees_blocks

    def list_again(self, index: int) -> tuple[Collective, ...]:
        """What backward gathers for a layer."""
        return self.layers[index].gather if self.gathers_again else ()


def _derive_unit(run: FineTuneConfig, parameters: Iterable[Owned], tp_rank: int) -> Unit:
    if run.parallel.dp_shard == 1:
        return Unit((), ())
    degree = run.parallel.mesh_shape.degree("dp_shard_cp")
    counts = [(count_share(each.ownership, tp_rank, degree), each.is_trained) for each in parameters]
    share, trained = sum(count for count, _ in counts), sum(count for count, is_trained in counts if is_trained)
    dtype, sum_dtype = run.precision.compute, run.precision.reduce_dtype
    return build_unit(run.parallel.mesh_shape, share, gathered=dtype, summed=sum_dtype, trained=trained)


def _derive_traffic(run: FineTuneConfig, layer: Layer, mask: AttentionMask) -> ContextTraffic:
    method = ContextMethod(run.context.method)
    return derive_context_traffic(derive_attention_plan(run, layer, mask), layer.attention, method)


def _list_forward(traffic: list[ContextTraffic], units: _Units) -> Iterator[Collective]:
    yield from units.ends.gather
    for each, unit in zip(traffic, units.layers, strict=True):
        yield from unit.gather
        yield from each.forward.collectives


def _list_backward(
    run: FineTuneConfig, traffic: list[ContextTraffic], units: _Units, *, is_last: bool
) -> Iterator[Collective]:
    """A layer is gathered when backward comes to the one behind it, the last at the start."""
    last = len(traffic) - 1
    yield from units.list_again(last)
    for index in range(last, -1, -1):
        yield from units.list_again(index - 1) if index else ()
        if run.train.recompute == "full":
            yield from traffic[index].forward.collectives
        yield from traffic[index].backward.collectives
        yield from units.layers[index].reduce if is_last else ()
    yield from units.ends.reduce if is_last else ()


def _list_sums(run: FineTuneConfig, model: Directory) -> Iterator[Collective]:
    """Gradients that backward has not summed, and the sum of squares of what each rank counts."""
    (axis, degree), shape = find_sums(run), run.parallel.mesh_shape
    if shape.dp_shard > 1:
        yield Collective(REDUCE, shape.name("dp_shard_cp"), shape.degree("dp_shard_cp"), (1,), "float32")
    elif degree > 1:
        number = sum(prod(each.local_shape(model.tp_rank)) for each in model.trained)
        yield Collective(REDUCE, axis, degree, (number,), run.precision.reduce_dtype)
