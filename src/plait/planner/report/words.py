"""What was asked and found, in sentences; everything is plain text that `escape` has yet to see."""

from collections.abc import Collection, Mapping

from plait.planner.cost import Cost
from plait.planner.hardware.constant import Constant
from plait.planner.plan import PlanReport, Worse
from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Prediction, Verdict
from plait.planner.tensor_degree import compare_terms
from plait.units import format_bytes, format_seconds, format_si


def describe_plan(plan: PlanConfig) -> str:
    """The degrees, and what departs from the usual: `tp 8, pp 4 x 2 chunks, dp 8`."""
    degrees = {"cp": plan.cp, "pp": plan.pp, "dp": plan.dp}
    words = [f"tp {plan.tp}", *(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)]
    if plan.interleave > 1:
        words.append(f"{plan.interleave} chunks a rank")
    if plan.schedule == "zero_bubble":
        words.append("zero bubble")
    if plan.cp > 1 and plan.context_method != "ring":
        words.append(f"{plan.context_method} over cp")
    return ", ".join(words)


def describe_settings(plan: PlanConfig) -> str:
    """What beside the degrees a plan decides."""
    words = [
        f"micro-batches of {plan.micro_batch}",
        "sequence parallel" if plan.sequence_parallel else "all-reduce mode",
        f"{'no' if plan.recompute == 'none' else plan.recompute} recompute",
        f"overlap {plan.overlap.policy}",
        plan.precision.compute if plan.quantization == "none" else plan.quantization,
        f"{plan.sharded} sharded over {plan.sharding_degree} ranks" if plan.sharding_degree > 1 else "nothing sharded",
    ]
    return ", ".join(words)


def describe_asked(report: PlanReport) -> str:
    """Model, devices, batch, and what was fixed."""
    tokens = report.seq_len * report.global_batch
    fixed = f", with {', '.join(report.fixed)} fixed" if report.fixed else ""
    return (
        f"{report.name} ({_format_parameters(report.model.num_parameters)}) on {report.cluster.num_devices:,} x "
        f"{report.cluster.hardware.title}: sequences of {report.seq_len:,} tokens, {report.global_batch:,} of them "
        f"a step ({tokens:,} tokens){fixed}. {report.num_considered:,} plans were considered."
    )


def _format_parameters(number: int) -> str:
    scale, name = (1e9, "billion") if number >= 1e9 else (1e6, "million")
    return f"{number / scale:.3g} {name} parameters"


def describe_verdict(report: PlanReport) -> str:
    """Which plan, how long, how much memory, what binds."""
    best = report.best
    head = f"The fastest plan that fits is {describe_plan(best.plan)}" if report.ranked else "No plan fits"
    near = "" if report.ranked else f"; {describe_plan(best.plan)} lacks least"
    low_s, high_s = best.interval_s
    return (
        f"{head}{near}: {format_seconds(best.step_s)} a step (between {format_seconds(low_s)} and "
        f"{format_seconds(high_s)}), MFU {best.mfu:.1%}. {describe_memory(best)} "
        f"What binds is {best.binding.term}: {best.binding.reason}."
    )


def describe_memory(prediction: Prediction) -> str:
    """A sentence on whether the worst rank has room."""
    memory = prediction.memory
    used = f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.capacity_bytes)}"
    if memory.verdict is Verdict.DOES_NOT_FIT:
        return f"The worst rank does not fit: it needs {used}, {format_bytes(-memory.margin_bytes)} too much."
    word = "fits" if memory.verdict is Verdict.FITS else "is tight"
    return f"The worst rank {word}: {used}, {format_bytes(memory.margin_bytes)} left."


def describe_mfu(prediction: Prediction) -> str:
    """What MFU is a share of: `of the datasheet's dense bfloat16 rate, 989 TFLOP/s`."""
    plan, peaks = prediction.plan, prediction.cluster.hardware.peaks.values()
    dtype = {"float8": "fp8", "float4": "fp4"}.get(plan.gemm_dtype, plan.gemm_dtype)
    rate = prediction.peak_flops_per_s
    stated = any(peak.value == rate and peak.provenance == "datasheet" for peak in peaks)
    whose = "the datasheet's dense" if stated else "the file's"
    return f"of {whose} {dtype} rate, {format_si(rate, 'FLOP/s')}"


def list_first_worse(report: PlanReport) -> list[tuple[str, str]]:
    """The first tensor degree at which the complete time gets worse, for each of the three questions."""
    tried = [f"tp {each.tp}" for each in report.degrees]
    none = f"only {tried[0]} was tried" if len(tried) == 1 else "no degree that was tried is worse than the one before"
    layers = {each.tp: each.layer for each in report.degrees if each.layer is not None}
    same = {each.tp: each.same for each in report.degrees if each.same is not None}
    best = {each.tp: each.best.step for each in report.degrees if each.best is not None}
    lacking = {tp for tp, prediction in same.items() if prediction.memory.verdict is Verdict.DOES_NOT_FIT}
    steps = {tp: prediction.step for tp, prediction in same.items()}
    return [
        ("One layer, on more and more devices", _describe_worse(report.worse_layer, layers) or none),
        (
            "The best plan's step with another tp, on these devices",
            _describe_worse(report.worse_same, steps, lacking) or none,
        ),
        ("The step, the rest of the plan chosen anew for each tp", _describe_worse(report.worse_best, best) or none),
    ]


def _describe_worse(worse: Worse | None, costs: Mapping[int, Cost], lacking: Collection[int] = ()) -> str:
    if worse is None:
        return ""
    after, before = (", which does not fit" if tp in lacking else "" for tp in (worse.tp, worse.before))
    if after and before:
        after, before = "", ", neither of which fits"
    unsure = "" if _is_told(costs[worse.tp], costs[worse.before]) else "; no worse than the prediction can tell"
    return (
        f"tp {worse.tp}{after}: {format_seconds(worse.seconds)} instead of {format_seconds(worse.before_s)} at tp "
        f"{worse.before}{before} ({worse.factor:.2f} times as long); {worse.term} grew most, by "
        f"{format_seconds(worse.term_s)}{unsure}"
    )


def _is_told(cost: Cost, before: Cost) -> bool:
    """Whether a difference is more than the constants leave open.

    What both have alike is as wrong in both, so only the terms that differ, each by as much as it does, are uncertain.
    """
    uncertainty = (cost.high_s - cost.low_s) / 2 / cost.seconds
    moved_s = sum(map(abs, compare_terms(cost, before).values()))
    return cost.seconds - before.seconds > uncertainty * moved_s


def format_constant(value: float, unit: str) -> str:
    """A catalog's value for people: `989 TFLOP/s`, `0.85`."""
    if unit == "s":
        return format_seconds(value) if value else "0 s"
    return f"{value:.4g}" if unit == "1" else format_si(value, unit)


def describe_range(constant: Constant) -> str:
    """Between which values it was seen, if that is known."""
    if constant.low is None or constant.high is None:
        return ""
    return f"{format_constant(constant.low, constant.unit)} to {format_constant(constant.high, constant.unit)}"
