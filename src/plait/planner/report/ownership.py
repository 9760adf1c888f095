"""Who owns which part of each weight and activation, drawn from the contract's layouts: a rectangle for each tensor.

Rows go down and columns to the right. A cut is drawn where it is, in the colour and with the number of the rank that
owns the part, so that uneven cuts look uneven; what several ranks hold is hatched and shows each of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from plait.contract.op import Op
from plait.contract.setting import Setting
from plait.contract.step import list_moves
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import Prediction
from plait.planner.report.palette import color_rank, color_text_on
from plait.sharding import Invariant, Kind, Layout, Partial, Replicate, Shard

_LARGEST = 150.0
"""Pixels of the longest side of all tensors of a section; others by the fourth root of their size, to be seen."""
_SMALLEST = 15.0
_ROOM_FOR_TEXT = 8.5
_SHARED = "#B8BCC4"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor, and what is to be said beneath it."""

    name: str
    layout: Layout
    note: str = ""


def list_weights(prediction: Prediction) -> list[Drawn]:
    """Every parameter of the ends and of one block, in the order of forward; a tied one once."""
    contract = derive_planned_model(prediction.model, prediction.plan, prediction.seq_len)
    blocks = prediction.model.num_layers
    weights: dict[str, Drawn] = {}
    for ops, note in ((contract.entry, ""), (contract.block, f"in each of {blocks} blocks"), (contract.exit, "")):
        for op in ops:
            for parameter in op.parameters:
                over = parameter.ownership.reduced_over
                summed = f"gradient summed over {over}" if over else ""
                drawn = Drawn(
                    _shorten(parameter.ownership.name), parameter.layout, ", ".join(filter(None, [note, summed]))
                )
                weights.setdefault(drawn.name, drawn)
    return list(weights.values())


def list_activations(prediction: Prediction) -> list[Drawn]:
    """What each operation of one micro-batch gathers, and what leaves it, in the order of forward."""
    contract = derive_planned_model(prediction.model, prediction.plan, prediction.seq_len)
    ops = (*contract.entry, *contract.block, *contract.exit)
    return [drawn for op in ops for drawn in _list_of_op(op, contract.setting)]


def _list_of_op(op: Op, setting: Setting) -> Iterator[Drawn]:
    for move in list_moves(op.forward):
        kind = move.collective.kind
        placement = Replicate() if kind is Kind.ALL_GATHER else Partial()
        note = (
            "gathered for as long as it is read" if kind is Kind.ALL_GATHER else f"an addend on each rank until {kind}"
        )
        yield Drawn(f"{_shorten(op.name)}: {move.tensor}", Layout(move.dims, move.collective.shape, placement), note)
    names = [f"{_shorten(op.name)}: {tensor.name}" for tensor in op.outputs]
    if len(op.outputs) > 1:
        prefix, _, _ = _shorten(op.name).rpartition(".")
        leaves = _shorten(op.name).removeprefix(f"{prefix}.").split("|")
        names = [f"{prefix}.{leaf}: {tensor.name}" for leaf, tensor in zip(leaves, op.outputs, strict=True)]
    yield from (Drawn(name, tensor.layout) for name, tensor in zip(names, op.outputs, strict=True))


def _shorten(name: str) -> str:
    """Without the number of the block that stands for all."""
    return name.removeprefix("layers.0.")


def draw_legend(degree: int) -> str:
    """A button for each rank, which shows what it owns."""
    buttons = "".join(
        f'<button type="button" class="rank" data-rank="{rank}" aria-pressed="false" style="background:{color};'
        f'color:{color_text_on(color)}" aria-label="show what tp rank {rank} owns">{rank}</button>'
        for rank in range(degree)
        for color in (color_rank(rank, degree),)
    )
    return f'<div class="ranks"><span>tp rank</span>{buttons}</div>'


def draw_all(tensors: list[Drawn], degree: int) -> str:
    """Figures side by side, all to one scale."""
    longest = max((size for drawn in tensors for size in drawn.layout.shape), default=1)
    return f'<div class="tensors">{"".join(_draw(drawn, degree, longest) for drawn in tensors)}</div>'


def _draw(drawn: Drawn, degree: int, longest: int) -> str:
    layout = drawn.layout
    rows, columns = (1, *layout.shape)[-2:]
    width, height = (max(_SMALLEST, _LARGEST * (size / longest) ** 0.25) for size in (columns, rows))
    parts = "".join(_draw_parts(drawn, degree, width, height))
    shape = " x ".join(f"{size:,}" for size in layout.shape)
    note = f"<br><small>{escape(drawn.note)}</small>" if drawn.note else ""
    return (
        f'<figure class="tensor"><svg width="{width:.1f}" height="{height:.1f}" viewBox="0 0 {width:.1f} {height:.1f}" '
        f'role="img" aria-label="{escape(drawn.name)} {escape(str(layout))}">{parts}</svg><figcaption>'
        f"<b>{_break(drawn.name)}</b><br><code>{escape(str(layout))}</code> {shape}{note}</figcaption></figure>"
    )


def _break(name: str) -> str:
    """Escaped, with places where a long name may go on in the next line."""
    return escape(name).replace(".", ".<wbr>").replace("|", "|<wbr>").replace("_", "_<wbr>")


def _draw_parts(drawn: Drawn, degree: int, width: float, height: float) -> Iterator[str]:
    layout = drawn.layout
    if not isinstance(layout.placement, Shard) or layout.split is None:
        yield from _draw_shared(drawn, degree, width, height)
        return
    is_across = layout.placement.dim == len(layout.shape) - 1
    length, thick = (width, height) if is_across else (height, width)
    what = layout.dims[layout.placement.dim]
    for ranks in layout.split.replica_groups:
        interval = layout.split.intervals[ranks[0]]
        start, extent = (length * edge / layout.split.size for edge in (interval.start, len(interval)))
        for place, rank in enumerate(ranks):
            low, span = thick * place / len(ranks), thick / len(ranks)
            box = (start, low, extent, span) if is_across else (low, start, span, extent)
            also = f", as do {len(ranks) - 1} others" if len(ranks) > 1 else ""
            words = f"tp rank {rank} owns {what} {interval} of {layout.split.size:,}{also}: {drawn.name}"
            yield _draw_box(box, color_rank(rank, degree), str(rank), words)
            yield _hatch(box) if len(ranks) > 1 else ""
            yield _label(box, str(rank), color_rank(rank, degree), most=len(str(degree - 1)))


def _draw_shared(drawn: Drawn, degree: int, width: float, height: float) -> Iterator[str]:
    """Whole on every rank: the same values, or an addend each."""
    is_addend = isinstance(drawn.layout.placement, Partial)
    words = "an addend of all of it on every rank" if is_addend else "all of it on every rank"
    assert is_addend or isinstance(drawn.layout.placement, Invariant | Replicate), drawn
    ranks = " ".join(map(str, range(degree)))
    box = (0.0, 0.0, width, height)
    yield _draw_box(box, _SHARED, ranks, f"{words}: {drawn.name}")
    if degree > 1:
        yield _hatch(box)
        yield _label(box, "sum" if is_addend else "all", _SHARED, most=3)


def _draw_box(box: tuple[float, float, float, float], color: str, ranks: str, words: str) -> str:
    x, y, width, height = box
    return (
        f'<rect class="part" data-ranks="{ranks}" data-words="{escape(words)}" x="{x:.2f}" y="{y:.2f}" '
        f'width="{width:.2f}" height="{height:.2f}" fill="{color}"><title>{escape(words)}</title></rect>'
    )


def _label(box: tuple[float, float, float, float], text: str, color: str, *, most: int) -> str:
    """Words in the middle, if there is room for as many as `most` letters."""
    x, y, width, height = box
    if min(width / max(1, 0.6 * most), height) < _ROOM_FOR_TEXT:
        return ""
    place = f'x="{x + width / 2:.2f}" y="{y + height / 2:.2f}"'
    return f'<text {place} fill="{color_text_on(color)}">{escape(text)}</text>'


def _hatch(box: tuple[float, float, float, float]) -> str:
    x, y, width, height = box
    return f'<rect class="hatch" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="url(#hatch)"/>'
