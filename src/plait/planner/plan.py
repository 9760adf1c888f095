"""Plan a run: all plans that the devices allow, ranked; which are refused, and why; how far tensor parallelism pays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.config.model import LlamaConfig, ModelConfig
from plait.errors import ConfigError
from plait.planner.cluster import Cluster
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import list_recipe_problems
from plait.planner.predict import predict
from plait.planner.prediction import Prediction
from plait.planner.search import Space, search
from plait.planner.space.degrees import Refusal, Task
from plait.planner.space.fixed import COUNTS, Fixed, check_fixed, describe_fixed
from plait.planner.tensor_degree import TensorDegree, Worse, build_tensor_degree, find_worse

__all__ = ["PlanReport", "Refusal", "TensorDegree", "Worse", "plan"]

LIMIT = 10
"""Plans of a report, unless it is asked for more."""

MOST = {"seq_len": 10**9, "global_batch": 10**7, "num_devices": 10**9}
"""Far beyond any run; from there on divisors are not found, nor micro-batches listed, in seconds."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was found.

    Attributes:
        name: of the model, as it was asked for.
        ranked: the fastest plans that fit, the fastest first, one of each tp, cp and pp.
        nearest: where none fits, the plan that lacks least.
        num_considered: all plans of the space, those too that were left out because they cannot be among the fastest.
        degrees: every tensor degree that the model and the devices allow, in ascending order.
        worse_layer: the first degree at which the layer takes longer, on however many devices.
        worse_same: at which the step takes longer on these devices, the rest of the best plan as it is.
        worse_best: at which it takes longer although the rest is chosen anew.
        fixed: what was asked for, as `tp = 8`.
        settings: the same as values.
    """

    name: str
    model: ModelConfig
    cluster: Cluster
    seq_len: int
    global_batch: int
    ranked: tuple[Prediction, ...]
    nearest: Prediction | None
    refused: tuple[Refusal, ...]
    degrees: tuple[TensorDegree, ...]
    worse_layer: Worse | None
    worse_same: Worse | None
    worse_best: Worse | None
    num_considered: int
    fixed: tuple[str, ...] = ()
    settings: Fixed = field(default_factory=dict)

    @property
    def best(self) -> Prediction:
        """The fastest plan that fits, or else the one that lacks least."""
        if self.ranked:
            return self.ranked[0]
        assert self.nearest is not None, "a report has a plan"
        return self.nearest


def plan(
    model: ModelConfig,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    fixed: Mapping[str, Any] | None = None,
    name: str = "model",
    limit: int = LIMIT,
    runs: Callable[[PlanConfig], bool] | None = None,
) -> PlanReport:
    """Rank every way to train `model` on `cluster` with sequences of `seq_len` tokens, `global_batch` of them a step.

    `fixed` holds fields of a `PlanConfig` (and `dp`) that are not to be chosen: `{"tp": 8, "recompute": "full"}`. What
    is not fixed is searched: degrees, sequence parallelism, micro-batch, chunks of a pipeline, recompute, sharding of
    parameters, gradients and optimizer state. Number formats stay as they are unless they are fixed. Equal arguments
    give equal reports. `name` is what the report calls the model; `runs` says which plans may be chosen, if not all.

    Raises:
        ConfigError: values of `fixed` that cannot be, or a batch, a sequence or degrees for which there is no plan.
    """
    settings = check_fixed(fixed or {}, what="fixed")
    task = replace(build_task(model, cluster, seq_len=seq_len, global_batch=global_batch), runs=runs)
    check_degrees(task, settings)
    space = search(task, settings, limit=limit)
    if not space.found and space.nearest is None:
        raise _build_refusal(task, settings, space.refused)
    predictions = {found.degrees: _predict(task, found.plan) for found in _list_kept(space, limit)}
    ranked = tuple(predictions.values())
    nearest = None if space.nearest is None else _predict(task, space.nearest)
    degrees = _build_degrees(task, ranked, nearest or ranked[0], space.refused)
    shown = {each.tp: each for each in degrees}
    layers = [(tp, each.layer) for tp, each in shown.items() if each.layer is not None]
    same = [(tp, each.same.step) for tp, each in shown.items() if each.same is not None]
    best = [(tp, each.best.step) for tp, each in shown.items() if each.best is not None]
    return PlanReport(
        name, task.model, cluster, seq_len, global_batch, ranked[:limit], nearest, space.refused, degrees,
        find_worse(layers), find_worse(same), find_worse(best), space.num_considered,
        tuple(describe_fixed({key: value}) for key, value in settings.items()), settings,
    )  # fmt: skip


def build_task(model: ModelConfig, cluster: Cluster, *, seq_len: int, global_batch: int) -> Task:
    """What is to be planned, once it is known to make sense.

    Raises:
        ConfigError: counts below 1 or beyond all runs, or sequences longer than the positions of the model.
    """
    counts = {"seq_len": seq_len, "global_batch": global_batch, "num_devices": cluster.num_devices}
    problems = [f"{name} = {count}: should be at least 1" for name, count in counts.items() if count < 1]
    problems += [
        f"{name} = {counts[name]}: should be at most {most}" for name, most in MOST.items() if counts[name] > most
    ]
    if seq_len > model.max_seq_len and not isinstance(model, LlamaConfig):
        problems.append(f"seq_len = {seq_len}: the model has learned positions for {model.max_seq_len} tokens")
    if problems:
        raise ConfigError.from_problems("plan", problems)
    if seq_len > model.max_seq_len:
        model = model.model_copy(update={"max_seq_len": seq_len})
    return Task(model, cluster, seq_len, global_batch)


def check_degrees(task: Task, fixed: Fixed) -> None:
    """Raise one error that lists what cannot be of fixed degrees on these devices, whatever else is chosen."""
    num_devices, problems = task.cluster.num_devices, []
    given = {name: fixed[name] for name in COUNTS[:6] if name in fixed}
    for name, degree in given.items():
        if num_devices % degree:
            problems.append(f"{name} = {degree} does not divide {num_devices} devices")
    axes = [name for name in ("tp", "cp", "pp") if name in given]
    data = ["dp"] if "dp" in given else [name for name in ("dp_replicate", "dp_shard") if name in given]
    product = 1
    for name in (*axes, *data):
        product *= given[name]
    is_complete = len(axes) == 3 and ("dp" in given or len(data) == 2)
    if not problems and (num_devices % product or (is_complete and product != num_devices)):
        shown = " * ".join(f"{name} {given[name]}" for name in (*axes, *data))
        problems.append(f"{shown} = {product} devices, but there are {num_devices}")
    problems += _list_recipe_problems(task, fixed)
    if "dp" in given and task.global_batch % given["dp"]:
        problems.append(f"a global batch of {task.global_batch} cannot be divided by dp = {given['dp']}")
    if problems:
        raise ConfigError.from_problems("fixed", problems)


def _list_recipe_problems(task: Task, fixed: Fixed) -> list[str]:
    """Of the recipe, whatever the degrees: on one rank, with all sequences in one micro-batch."""
    plan = PlanConfig(quantization=fixed.get("quantization", "none"), micro_batch=task.global_batch)
    return list_recipe_problems(task.model, task.cluster.hardware, plan, task.seq_len)


def _list_kept(space: Space, limit: int) -> list[Any]:
    """The fastest, and the fastest of each tp."""
    first_of_tp = {found.degrees.tp: found for found in reversed(space.found)}
    kept = {found.degrees: found for found in (*space.found[:limit], *first_of_tp.values())}
    return sorted(kept.values())


def _predict(task: Task, chosen: PlanConfig) -> Prediction:
    return predict(task.model, task.cluster, chosen, seq_len=task.seq_len, global_batch=task.global_batch)


def _build_degrees(
    task: Task, ranked: Sequence[Prediction], best: Prediction, refused: Sequence[Refusal]
) -> tuple[TensorDegree, ...]:
    """Those of which there is a plan, and those of which none fits."""
    of_tp: dict[int, Prediction] = {}
    for prediction in ranked:
        of_tp.setdefault(prediction.plan.tp, prediction)
    lacking: dict[int, float] = {}
    for refusal in refused:
        if refusal.degrees is not None and refusal.lacking_bytes:
            tp = refusal.degrees.tp
            lacking[tp] = min(refusal.lacking_bytes, lacking.get(tp, refusal.lacking_bytes))
    reasons = {
        tp: f"no plan fits: the leanest lacks {size / 1e9:.1f} GB" for tp, size in lacking.items() if tp not in of_tp
    }
    return tuple(
        build_tensor_degree(tp, best.plan, task, of_tp.get(tp), reasons.get(tp, ""))
        for tp in sorted({*of_tp, *reasons})
    )


def _build_refusal(task: Task, fixed: Fixed, refused: Sequence[Refusal]) -> ConfigError:
    """There is no plan at all: the batch, the sequence or the degrees cannot be."""
    asked = f" with {describe_fixed(fixed)}" if fixed else ""
    batch = f"{task.global_batch} sequences of {task.seq_len} tokens"
    what = f"there is no plan for {batch} on {task.cluster.num_devices} devices{asked}"
    reasons = [f"{refusal.what}: {refusal.reason}" for refusal in refused[:8]]
    return ConfigError.from_problems(what, reasons or ["no micro-batch fits the degrees"])


def with_settings(
    report: PlanReport, settings: Fixed, limit: int = 1, runs: Callable[[PlanConfig], bool] | None = None
) -> PlanReport:
    """The same question with more of the plan fixed, or of fewer plans."""
    return plan(
        report.model, report.cluster, seq_len=report.seq_len, global_batch=report.global_batch,
        fixed={**report.settings, **settings}, name=report.name, limit=limit, runs=runs,
    )  # fmt: skip
