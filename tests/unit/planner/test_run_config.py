"""A plan becomes a run that `plait train` takes."""

from pathlib import Path
from typing import Any

import pytest

from plait.config.file.format import format_run_config
from plait.config.load import load_run_config
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import RECIPES
from plait.errors import ConfigError
from plait.planner import Cluster, PlanReport, load_hardware, plan
from plait.planner.plan_config import PlanConfig
from plait.planner.run_config import build_run_config, choose_runnable

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
        "the best plan has gradients sharded over dp, which plait train does not run; the fastest that it runs is tp = "
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_plan_computes_again_its_run_does(recompute: str) -> None:
    chosen, _ = choose_runnable(build(tp=1, cp=1, pp=1, sharded="nothing", recompute=recompute))
    assert build_run_config(chosen, BASE).train.recompute == recompute


@pytest.mark.parametrize(
    ("fixed", "schedule", "stages_per_rank"),
    [
        ({"pp": 2, "schedule": "1f1b", "micro_batch": 1}, "1f1b", 1),
        ({"pp": 2, "interleave": 2, "micro_batch": 1, "schedule": "interleaved"}, "interleaved", 2),
        ({"pp": 2, "interleave": 2, "micro_batch": 1}, "zero_bubble", 2),
        ({"pp": 4, "interleave": 1, "micro_batch": 8}, "gpipe", 1),
    ],
)
def test_a_pipeline_is_written(fixed: dict[str, Any], schedule: str, stages_per_rank: int) -> None:
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


@pytest.mark.parametrize(
    ("fixed", "degrees"),
    [
        ({"dp_shard": 4}, (1, 4, 1, 1)),
        ({"dp_shard": 2}, (2, 2, 1, 1)),
        ({"cp": 2, "dp_shard": 2}, (1, 2, 2, 1)),
        ({"pp": 2, "dp_shard": 2}, (1, 2, 1, 2)),
    ],
)
def test_a_plan_that_shares_parameters_out_is_a_run(
    fixed: dict[str, int], degrees: tuple[int, ...], tmp_path: Path
) -> None:
    chosen, note = choose_runnable(build(**{"tp": 1, "cp": 1, "pp": 1, "sharded": "parameters", **fixed}))
    run = build_run_config(chosen, BASE)
    path = tmp_path / "plan.toml"
    path.write_text(format_run_config(run))
    assert not note
    assert load_run_config(str(path)) == run
    parallel = run.parallel
    assert (parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.pp) == degrees
    assert parallel.reshard_after_forward is None
    assert "reshard_after_forward" not in path.read_text()


def test_of_all_that_runs_the_fastest_is_chosen() -> None:
    """Here parameters have to be shared out: replicated, none of these plans fits."""
    model = load_run_config("llama3-8b").model
    report = plan(
        model, Cluster(load_hardware("h100"), 16), seq_len=4096, global_batch=64, fixed={"tp": 1, "pp": 1, "cp": 1}
    )
    chosen, note = choose_runnable(report)
    other = plan(
        model, Cluster(load_hardware("h100"), 16), seq_len=4096, global_batch=64,
        fixed={"tp": 1, "pp": 1, "cp": 1, "sharded": "parameters"},
    )  # fmt: skip
    assert chosen == other.best
    assert chosen.plan.sharded == "parameters"
    assert f"parameters over {chosen.plan.dp_shard}" in note or not report.best.plan.list_missing()


def test_compiled_blocks_leave_less_to_choose() -> None:
    model = load_run_config("llama3-8b").model
    fixed = {"sharded": "parameters", "cp": 2}
    report = plan(model, Cluster(load_hardware("h100"), 8), seq_len=4096, global_batch=8, fixed=fixed)
    with pytest.raises(ConfigError, match="cp = 2 with compiled blocks, which plait train does not run, and cp is"):
        choose_runnable(report, compiled=True)
    report = plan(
        model, Cluster(load_hardware("h100"), 8), seq_len=32768, global_batch=8, fixed={"tp": 1, "pp": 1, "dp": 8}
    )
    assert report.best.plan.recompute != "none"
    with pytest.raises(ConfigError, match="recompute = .* of compiled blocks.* none fits"):
        choose_runnable(report, compiled=True)


def test_a_recipe_over_context_ranks_is_none() -> None:
    (missing,) = PlanConfig(cp=2, sharded="nothing", quantization="fp8_currentscaling").list_missing()
    assert str(missing) == "quantization = fp8_currentscaling over cp = 2"


@pytest.mark.parametrize(
    ("plan", "missing"),
    [
        (PlanConfig(dp_replicate=4, sharded="nothing"), []),
        (PlanConfig(dp_shard=4, sharded="parameters"), []),
        (PlanConfig(dp_shard=2, cp=2, sharded="parameters"), []),
        (PlanConfig(tp=4), []),
        (PlanConfig(dp_shard=4), ["optimizer sharded over dp"]),
        (PlanConfig(dp_shard=4, sharded="gradients"), ["gradients sharded over dp"]),
        (PlanConfig(cp=2, sharded="parameters"), ["parameters sharded over cp alone"]),
        (PlanConfig(quantization="fp8_rowwise"), ["quantization = fp8_rowwise"]),
    ],
)
def test_what_a_run_refuses_is_missing(plan: PlanConfig, missing: list[str]) -> None:
    assert [str(each) for each in plan.list_missing()] == missing


def test_where_no_plan_that_runs_fits_it_is_said() -> None:
    model = load_run_config("llama3-70b").model
    report = plan(model, Cluster(load_hardware("h100"), 8), seq_len=4096, global_batch=64, fixed={"tp": 2, "pp": 1})
    with pytest.raises(ConfigError, match="none fits: the nearest lacks"):
        choose_runnable(report)
