"""A plan becomes a run that `plait train` takes."""

from pathlib import Path

import pytest

from plait.config.file.format import format_run_config
from plait.config.load import load_run_config
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import RECIPES
from plait.errors import ConfigError
from plait.planner import Cluster, PlanReport, load_hardware, plan
from plait.planner.plan_config import PlanConfig
from plait.planner.run_config import RUNTIME, build_run_config, choose_runnable

BASE = load_run_config("llama-demo", ["train.steps=7", "data.kind=tokens", "data.paths=corpus.bin"])


def build(**fixed: object) -> PlanReport:
    return plan(BASE.model, Cluster(load_hardware("h100"), 4), seq_len=128, global_batch=16, fixed=fixed)


def test_the_written_run_loads_as_the_same(tmp_path: Path) -> None:
    prediction, _ = choose_runnable(build(tp=2))
    run = build_run_config(prediction, BASE)
    path = tmp_path / "plan.toml"
    path.write_text(format_run_config(run))
    assert load_run_config(str(path)) == run
    assert (run.parallel.tp, run.parallel.dp, run.seq_len, run.train.steps) == (2, 2, 128, 7)
    assert run.tokens_per_step == 16 * 128
    assert run.data == BASE.data


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_written_and_runs(recipe: str, tmp_path: Path) -> None:
    """Where there are blocks beside the first and the last, those are kept, as where a run says no more."""
    base = load_run_config("llama-demo", ["model.num_layers=4"])
    report = plan(
        base.model, Cluster(load_hardware("b200"), 4), seq_len=128, global_batch=16, fixed={"quantization": recipe}
    )
    prediction, _ = choose_runnable(report)
    run = build_run_config(prediction, base)
    path = tmp_path / "plan.toml"
    path.write_text(format_run_config(run))
    assert load_run_config(str(path)) == run
    assert run.quantization == QuantizationConfig.model_validate(recipe)
    assert any("all blocks are timed as quantized" in weak for weak in prediction.weak)


def test_what_a_run_says_of_its_recipe_is_kept() -> None:
    asked = ["model.num_layers=4", "quantization=mxfp8", "quantization.keep_first=2", "quantization.layers=mlp_only"]
    base = load_run_config("llama-demo", asked)
    fixed = {"quantization": "mxfp8", "tp": 2}
    report = plan(base.model, Cluster(load_hardware("b200"), 4), seq_len=128, global_batch=16, fixed=fixed)
    assert build_run_config(choose_runnable(report)[0], base).quantization == base.quantization


def test_of_two_blocks_both_are_quantized() -> None:
    fixed = {"quantization": "fp8_currentscaling"}
    report = plan(BASE.model, Cluster(load_hardware("h100"), 4), seq_len=128, global_batch=16, fixed=fixed)
    run = build_run_config(choose_runnable(report)[0], BASE)
    assert (run.quantization.keep_first, run.quantization.keep_last) == (0, 0)


def test_what_is_fixed_and_the_runtime_lacks_is_refused() -> None:
    report = build(tp=1, cp=1, pp=1, sharded="optimizer")
    with pytest.raises(ConfigError, match="optimizer sharded over dp, .* and sharded is fixed"):
        choose_runnable(report)


def test_the_best_that_it_runs_stands_in_for_a_best_that_it_does_not() -> None:
    model = load_run_config("llama3-8b").model
    report = plan(model, Cluster(load_hardware("h100"), 16), seq_len=4096, global_batch=64)
    assert report.best.plan.list_missing()
    chosen, note = choose_runnable(report)
    assert chosen.plan.list_missing() == ()
    assert chosen.step_s > report.best.step_s
    assert note.startswith(
        "the best plan has optimizer sharded over dp, which plait train does not run yet; the fastest"
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_plan_computes_again_its_run_does(recompute: str) -> None:
    chosen, _ = choose_runnable(build(tp=1, cp=1, pp=1, sharded="nothing", recompute=recompute))
    assert build_run_config(chosen, BASE).train.recompute == recompute


@pytest.mark.parametrize(
    ("fixed", "schedule", "stages_per_rank"),
    [
        ({"pp": 2, "interleave": 1, "micro_batch": 1}, "1f1b", 1),
        ({"pp": 2, "interleave": 2, "micro_batch": 1}, "interleaved", 2),
        ({"pp": 4, "interleave": 1, "micro_batch": 8}, "gpipe", 1),
    ],
)
def test_a_pipeline_is_written(fixed: dict[str, int], schedule: str, stages_per_rank: int) -> None:
    model = BASE.model.model_copy(update={"num_layers": 8})
    asked = {"tp": 1, "cp": 1, "sharded": "nothing", **fixed}
    report = plan(model, Cluster(load_hardware("h100"), 4), seq_len=128, global_batch=16, fixed=asked)
    run = build_run_config(choose_runnable(report)[0], BASE)
    assert run.parallel.pp == fixed["pp"]
    assert (run.pipeline.schedule, run.pipeline.stages_per_rank) == (schedule, stages_per_rank)


def test_a_plan_over_context_ranks_is_a_run() -> None:
    chosen, note = choose_runnable(build(tp=1, cp=2, pp=1, sharded="nothing"))
    assert not note
    assert build_run_config(chosen, BASE).parallel.cp == 2


def test_a_recipe_over_context_ranks_is_none() -> None:
    assert PlanConfig(cp=2, sharded="nothing", quantization="fp8_currentscaling").list_missing() == (
        "quantization = fp8_currentscaling over cp = 2",
    )


def test_runtime_is_what_a_plan_does_not_lack() -> None:
    assert PlanConfig(**RUNTIME).list_missing() == ()  # type: ignore[arg-type]


def test_where_no_plan_that_runs_fits_it_is_said() -> None:
    model = load_run_config("llama3-70b").model
    fixed = {"tp": 2, "pp": 1}
    report = plan(model, Cluster(load_hardware("h100"), 64), seq_len=4096, global_batch=64, fixed=fixed)
    with pytest.raises(ConfigError, match="none fits: the nearest lacks"):
        choose_runnable(report)
