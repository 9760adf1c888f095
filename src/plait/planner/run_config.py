"""From a plan to the config of a run that `plait train` takes."""

from plait.config.parallel import ParallelConfig
from plait.config.run import RunConfig
from plait.errors import ConfigError, PlaitError
from plait.planner.plan import PlanReport, with_settings
from plait.planner.prediction import Prediction
from plait.units import format_bytes, format_seconds

RUNTIME = {"cp": 1, "pp": 1, "recompute": "none", "sharded": "nothing", "quantization": "none"}
"""What of a plan has to be so for `plait train` to run it; `PlanConfig.list_missing` names what is not."""


def build_run_config(prediction: Prediction, base: RunConfig) -> RunConfig:
    """The run of `base` as the plan has it: model, mesh, overlap, precision, sequence and batch are the plan's."""
    plan = prediction.plan
    train = {
        "seq_len": prediction.seq_len,
        "micro_batch_size": plan.micro_batch,
        "gradient_accumulation": plan.num_micro_batches(prediction.global_batch),
    }
    return RunConfig.model_validate(
        {
            **{name: getattr(base, name) for name in base.model_fields_set},
            "model": prediction.model,
            "parallel": ParallelConfig(tp=plan.tp, dp=plan.dp, sequence_parallel=plan.sequence_parallel),
            "overlap": plan.overlap,
            "precision": plan.precision,
            "train": base.train.model_copy(update=train),
        }
    )


def check_can_run(report: PlanReport) -> None:
    """Refuse a best plan that does not fit or that `plait train` does not run yet, and name the best that it does.

    Raises:
        ConfigError: why not, and how to get a plan that it runs.
    """
    if not report.ranked:
        raise ConfigError(f"no plan fits: the nearest lacks {format_bytes(-report.best.memory.margin_bytes)}")
    missing = report.best.plan.list_missing()
    if not missing:
        return
    problem = f"the best plan has {', '.join(missing)}, which plait train does not run yet"
    wish = ",".join(f"{name}={value}" for name, value in RUNTIME.items())
    raise ConfigError(problem, hint=f"--fix {wish} plans with what it runs: {_describe_best(report)}")


def _describe_best(report: PlanReport) -> str:
    try:
        found = with_settings(report, RUNTIME)
    except PlaitError as error:
        return f"there is none: {error.message}"
    best = found.best
    if not found.ranked:
        return f"none fits, the nearest lacks {format_bytes(-best.memory.margin_bytes)}"
    slower = best.step_s / report.best.step_s
    return f"tp = {best.plan.tp}, dp = {best.plan.dp}, {format_seconds(best.step_s)} a step, {slower:.2f} times as long"
