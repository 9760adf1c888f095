"""What a step is made of: layer, GEMM and collective, bubble, head, optimizer; each leaf with its constants."""

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from plait.planner.cost import Cost
from plait.planner.hardware import Constant
from plait.planner.prediction import Prediction
from plait.planner.report.words import format_constant
from plait.units import format_seconds


def build_explanation(prediction: Prediction) -> RenderableType:
    """The tree of the step, and a table of the constants that its leaves name."""
    known = {constant.name: constant for constant in prediction.constants}
    step = prediction.step
    tree = Tree(_describe(step, step.seconds, 1.0))
    _grow(tree, step, 1.0, step.seconds, known)
    return Group(Text("What the step is made of"), tree, Text(), _build_constants(known.values()))


def _grow(tree: Tree, cost: Cost, times: float, whole_s: float, known: Mapping[str, Constant]) -> None:
    for part in cost.parts:
        branch = tree.add(_describe(part, whole_s, times * cost.times))
        if part.parts:
            _grow(branch, part, times * cost.times, whole_s, known)
        elif part.constants:
            branch.add(Text("; ".join(_list_provenance(part, known)), style="dim"))


def _describe(cost: Cost, whole_s: float, times: float) -> Text:
    """`forward 1.50 ms, 31.2%, 65% of peak, [8192, 8192] @ ...`."""
    words = [f"{cost.name} {format_seconds(cost.seconds)}" if cost.seconds else f"{cost.name} nothing exposed"]
    if cost.times != 1:
        words[0] += f" ({cost.times:g} times {format_seconds(cost.seconds / cost.times)})"
    words.append(f"{cost.seconds * times / whole_s:.1%} of the step")
    if cost.efficiency is not None:
        words.append(f"{cost.efficiency:.0%} of peak")
    if cost.kind is not None and cost.hidden_s and not cost.parts:
        words.append(f"{format_seconds(cost.hidden_s)} hidden")
    if cost.note:
        words.append(cost.note)
    return Text(", ".join(words))


def _list_provenance(cost: Cost, known: Mapping[str, Constant]) -> Iterator[str]:
    """`fitted gemm.bfloat16.efficiency, derate.training; datasheet peak.bfloat16`."""
    groups: dict[str, list[str]] = {}
    for name in cost.constants:
        groups.setdefault(str(known[name].provenance), []).append(name)
    for provenance, names in groups.items():
        yield f"{provenance} {', '.join(names)}"


def _build_constants(constants: Iterable[Constant]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("provenance")
    table.add_column("source")
    for each in dict.fromkeys(constants):
        value = "" if each.name.startswith("collectives.") else format_constant(each.value, each.unit)
        table.add_row(each.name, value, str(each.provenance), f"{each.source} ({each.date})")
    return table
