"""What was found about a server, for a reader: times and memory of every degree, and what follows, in 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.planner.inference.memory import InferenceMemoryPart
from plait.planner.inference.plan import InferenceDegree, InferenceReport
from plait.planner.inference.prediction import InferencePrediction
from plait.planner.prediction import Verdict
from plait.planner.tensor_degree import Worse
from plait.units import format_bytes, format_seconds, format_si

_MOST_ROWS = 10
"""With more degrees than this, only those that give every rank as much are shown."""

_UNEVEN = "*"


def build_inference_tables(name: str, report: InferenceReport) -> RenderableType:
    """Tables and sentences; `name` is that of the model, as it was asked for."""
    shown = _choose_degrees(report)
    parts: list[RenderableType] = [
        Text(_describe_asked(name, report)), Text(), _build_times(shown), Text(), _build_memory(shown), Text(),
    ]  # fmt: skip
    return Group(*parts, *(Text(sentence) for sentence in _list_findings(report, shown)))


def _choose_degrees(report: InferenceReport) -> list[InferenceDegree]:
    known = [each for each in report.degrees if each.prediction is not None]
    if len(known) <= _MOST_ROWS:
        return known
    worse = (report.worse_decode_any, report.worse_prefill_any)
    named = {each.tp for each in worse if each} | {each.server.tp for each in (report.fastest,) if each}
    return [each for each in known if each.is_even or each.tp in named]


def _describe_asked(name: str, report: InferenceReport) -> str:
    load = report.load
    fixed = f", {', '.join(report.fixed)} fixed" if report.fixed else ""
    together = f", {load.prefill_batch} prompts read together" if load.prefill_batch > 1 else ""
    return (
        f"{name} served on {report.cluster.num_devices} x {report.cluster.hardware.title}: {load.batch} requests at a "
        f"time, prompts of {load.prompt_len} tokens, answers of {load.generate_len}{together}{fixed}"
    )


def _build_times(degrees: Sequence[InferenceDegree]) -> Table:
    has_host = any(each.host for each in degrees)
    columns = ("tp", "first token", "per token", *(("by host",) if has_host else ()), "tokens/s")
    table = _start_table((*columns, "mode", "tokens wait for"), len(columns))
    for degree in degrees:
        if (prediction := degree.prediction) is None:
            continue
        host = [format_seconds(degree.host.time_per_output_token_s)] if degree.host else []
        binding = max(prediction.decode_terms, key=lambda pair: pair[1])
        share = binding[1] / prediction.time_per_output_token_s
        table.add_row(
            _name_degree(degree),
            format_seconds(prediction.time_to_first_token_s),
            format_seconds(prediction.time_per_output_token_s),
            *host,
            format_si(prediction.tokens_per_s, ""),
            _name_mode(prediction),
            f"{binding[0]} {share:.0%}",
        )
    return table


def _build_memory(degrees: Sequence[InferenceDegree]) -> Table:
    columns = ("tp", "weights", "KV cache", "other", "total", "max batch", "max tokens")
    table = _start_table((*columns, "verdict"), len(columns))
    for degree in degrees:
        if (prediction := degree.prediction) is None:
            continue
        memory = prediction.memory
        weights, cache = (memory.bytes_of(part) for part in (InferenceMemoryPart.WEIGHTS, InferenceMemoryPart.KV_CACHE))
        sizes = (weights, cache, memory.total_bytes - weights - cache, memory.total_bytes)
        lacking = memory.verdict is Verdict.DOES_NOT_FIT
        verdict = f"lacks {format_bytes(-memory.margin_bytes)}" if lacking else str(memory.verdict)
        table.add_row(
            _name_degree(degree),
            *(format_bytes(size) for size in sizes),
            str(memory.max_batch),
            format_si(memory.max_cached_tokens, ""),
            verdict,
        )
    return table


def _start_table(columns: Sequence[str], num_right: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index < num_right else "left", no_wrap=True)
    return table


def _name_degree(degree: InferenceDegree) -> str:
    return f"{degree.tp}{'' if degree.is_even else _UNEVEN}"


def _name_mode(prediction: InferencePrediction) -> str:
    if prediction.server.tp == 1:
        return "-"
    return "SP" if prediction.server.sequence_parallel else "AR"


def _list_findings(report: InferenceReport, shown: Sequence[InferenceDegree]) -> Iterator[str]:
    """What follows, in sentences."""
    fastest, most = report.fastest, report.most_tokens
    if fastest is None or most is None:
        yield "no degree has room for this load: fewer requests, shorter contexts, fp8 weights or more devices"
    else:
        yield f"fastest with room: {_describe_times(fastest)}; reading prompts waits for {_name_binding(fastest)}"
        rate = format_si(most.tokens_per_s_per_device, "")
        yield f"most tokens from a device with room: tp {most.server.tp}, {rate} tokens/s, {most.num_replicas} replicas"
    yield f"time per token first gets worse {_describe_worse(report.worse_decode, report.worse_decode_any)}"
    yield f"time to first token first gets worse {_describe_worse(report.worse_prefill, report.worse_prefill_any)}"
    yield f"max batch: requests of {report.load.context_len} tokens that still fit; max tokens: batch times context"
    if any(each.server.tp > report.model.num_kv_heads for each in report.predictions):
        heads = report.model.num_kv_heads
        yield f"beyond tp {heads} a KV head is on several ranks, and a rank's cache shrinks no further"
    if any(each.server.sequence_parallel for each in report.predictions):
        yield "mode: prompts are read sequence parallel (SP) or with all-reduces (AR); tokens with all-reduces always"
    if any(not each.is_even for each in shown):
        yield f"{_UNEVEN} some ranks have more heads or columns than others"
    yield from _list_refused(report)
    if fastest is not None:
        yield from (f"weak: {weak}" for weak in fastest.weak)


def _describe_times(prediction: InferencePrediction) -> str:
    first, token = prediction.prefill, prediction.decode
    return (
        f"tp {prediction.server.tp}, {format_seconds(token.seconds)} per token ({format_seconds(token.low_s)} to "
        f"{format_seconds(token.high_s)}), {format_seconds(first.seconds)} to the first "
        f"({format_seconds(first.low_s)} to {format_seconds(first.high_s)})"
    )


def _name_binding(prediction: InferencePrediction) -> str:
    binding = prediction.prefill_binding
    return f"{binding.term} {binding.share:.0%}"


def _describe_worse(worse: Worse | None, of_any: Worse | None) -> str:
    also = f"; counting uneven degrees, at {_name_step(of_any)}" if of_any and of_any != worse else ""
    if worse is None:
        return f"at no degree that was tried{also}"
    return f"at {_name_step(worse)}, by {worse.term}{also}"


def _name_step(worse: Worse) -> str:
    before, after = format_seconds(worse.before_s), format_seconds(worse.seconds)
    return f"tp {worse.tp} ({before} at {worse.before} -> {after}, {worse.factor:.4g} times as long)"


def _list_refused(report: InferenceReport) -> Iterator[str]:
    refused = [each for each in report.degrees if each.prediction is None]
    if refused:
        degrees = ", ".join(str(each.tp) for each in refused[:6]) + (" ..." if len(refused) > 6 else "")
        yield f"tp {degrees} cannot be: {refused[0].reason}"
