"""A plan as a table of 80 columns."""

from collections.abc import Mapping, Sequence

from plait.contract.plan import Role, VocabEmbedding, VocabHead, name_role
from plait.hf.finding import Finding
from plait.sharding import Columns, KeyValueHeads

WIDTH = 80
"""Columns."""


def build_table(findings: Mapping[str, Finding], layers: str, regions: Sequence[str]) -> str:
    """A line for each pattern: its role, in what it is cut or that it is whole, and by which rule or why.

    What is in every layer is below a line that names the list of layers; what is marked by `>` is in a region, whose
    input is gathered once for all of it.
    """
    rows, inside = [("module", "role", "cut in", "by")], f"{layers}.*."
    current = ""
    for pattern, finding in findings.items():
        parent, leaf = (layers, pattern.removeprefix(inside)) if pattern.startswith(inside) else ("", pattern)
        if parent != current and parent:
            rows.append((f"{parent}.*", "", "", ""))
        current = parent
        region = next((each for each in regions if pattern.startswith(f"{each}.")), None)
        if region is not None:
            leaf = f"> {leaf}"
        why = finding.why if finding.whole is None else f"{finding.why}: {finding.whole}"
        rows.append((f"  {leaf}" if parent else leaf, name_role(finding.role), _describe_cut(finding), why))
    return "\n".join(_align(rows))


def _describe_cut(finding: Finding) -> str:
    if isinstance(finding.role, VocabEmbedding | VocabHead):
        return "vocabulary"
    if finding.whole is not None:
        return "whole"
    return _name_cut(finding.role)


def _name_cut(role: Role) -> str:
    cut = getattr(role, "cut", None)
    if cut is None:
        return ""
    if isinstance(cut, Columns):
        return "columns"
    return f"{cut.num_kv_heads} KV heads" if isinstance(cut, KeyValueHeads) else f"{cut.num_heads} heads"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns side by side; the last is wrapped below itself."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    start = sum(widths) + 2 * len(widths)
    lines = []
    for *cells, last in rows:
        begin = "  ".join([cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]) + "  "
        first, *others = _wrap(last, max(12, WIDTH - start))
        lines += [(begin + first).rstrip(), *(" " * start + other for other in others)]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    words = [word[start : start + width] for word in text.split(" ") for start in range(0, max(1, len(word)), width)]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
