"""From a plan to the config of a run that `plait train` takes."""

from plait.config.quantization import QuantizationConfig
from plait.config.run import RunConfig
from plait.errors import ConfigError, PlaitError
from plait.planner.plan import PlanReport, with_settings
from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Prediction
from plait.units import format_bytes, format_seconds


def build_run_config(prediction: Prediction, base: RunConfig) -> RunConfig:
    """The run of `base` as the plan has it: model, mesh, overlap, precision, sequence and batch are the plan's."""
    plan = prediction.plan
    num_micro_batches = plan.num_micro_batches(prediction.global_batch)
    train = {
        "seq_len": prediction.seq_len,
        "micro_batch_size": plan.micro_batch,
        "recompute": plan.recompute,
        "gradient_accumulation": num_micro_batches,
    }
    return RunConfig.model_validate(
        {
            **{name: getattr(base, name) for name in base.model_fields_set},
            "model": prediction.model,
            "parallel": plan.parallel,
            "pipeline": plan.build_pipeline(num_micro_batches),
            **({"context": plan.context} if plan.cp > 1 else {}),
            "overlap": plan.overlap,
            "precision": plan.precision,
            "quantization": _choose_section(prediction, base),
            "train": base.train.model_copy(update=train),
        }
    )


def _choose_section(prediction: Prediction, base: RunConfig) -> QuantizationConfig:
    """What the run said of the recipe, or else its defaults: the first and last blocks kept, if that leaves any."""
    plan = prediction.plan
    if base.quantization.recipe == plan.quantization:
        return base.quantization
    kept = QuantizationConfig.model_fields["keep_first"].default + QuantizationConfig.model_fields["keep_last"].default
    if plan.section.resolved is None or prediction.model.num_layers <= kept:
        return plan.section
    return QuantizationConfig(recipe=plan.section.recipe)


def choose_runnable(report: PlanReport, *, compiled: bool = False) -> tuple[Prediction, str]:
    """The fastest plan that fits and that `plait train` runs, and in words what it stands in for, if it does.

    That is the report's best plan, or else the best of all that lack nothing. What was fixed stays fixed. With blocks
    `compiled` a run does less.

    Raises:
        ConfigError: there is none: what was fixed is what it does not run, or none of those plans fits.
    """
    best = report.best
    missing = best.plan.list_missing(compiled=compiled)
    if report.ranked and not missing:
        return best, ""
    lacks = f"the best plan has {', '.join(map(str, missing))}, which plait train does not run"
    lacks = lacks if missing else "no plan fits"
    fixed = dict.fromkeys(name for each in missing if report.settings.keys() >= {*each.fields} for name in each.fields)
    if fixed:
        raise ConfigError(f"{lacks}, and {', '.join(fixed)} is fixed", hint=f"leave {', '.join(fixed)} to the search")
    try:
        found = with_settings(report, {}, runs=lambda plan: not plan.list_missing(compiled=compiled))
    except PlaitError as error:
        raise ConfigError(f"{lacks}, and without that there is none: {error.message}") from error
    if not found.ranked:
        lacking = format_bytes(-found.best.memory.margin_bytes)
        raise ConfigError(f"{lacks}, and without that none fits: the nearest lacks {lacking}", hint="more devices")
    other = found.best
    times = f"{format_seconds(other.step_s)} a step, {other.step_s / best.step_s:.2f} times as long"
    return other, f"{lacks}; the fastest that it runs is {_name_degrees(other.plan)}: {times}"


def _name_degrees(plan: PlanConfig) -> str:
    words = [f"tp = {plan.tp}", f"dp = {plan.dp}"]
    if plan.gathers_units:
        words[-1] += f" (parameters over {plan.sharding_degree})"
    words += [f"{name} = {degree}" for name, degree in (("cp", plan.cp), ("pp", plan.pp)) if degree > 1]
    return ", ".join(words)
