"""What precision recipes make of contracts: what travels, is agreed on before, is kept, and what stays as it is."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config import LlamaConfig, ParallelConfig, QuantizationConfig, RunConfig, load_preset, load_run_config
from plait.config.conflicts import list_block_conflicts
from plait.config.recipe import RECIPES, Operand, Recipe
from plait.contract.linear import LinearParameters, derive_column_group, derive_row
from plait.contract.model import derive_model, derive_ownership, derive_plan, derive_recipes
from plait.contract.op import Op
from plait.contract.parameter import Parameter, derive_parameter_ownership
from plait.contract.plan import Column, FeatureNorm, InnerColumn, Plan, Role, Row, TokenLocal
from plait.contract.quantization import (
    align_plan,
    count_amaxes,
    count_blocks,
    count_row_bytes,
    list_histories,
    list_orientations,
    list_torn_blocks,
    select_linears,
)
from plait.contract.report.tally import build_tally, count_collectives
from plait.contract.report.training import build_step_tally
from plait.contract.setting import Setting
from plait.contract.step import Gemm, list_collectives
from plait.contract.training import derive_closing_collectives, derive_run_model, derive_step_collectives
from plait.errors import ConfigError, ShardingError
from plait.sharding import Columns, Kind, Ownership, build_split

CURRENT, DELAYED, MXFP8, NVFP4 = RECIPES.values()
DECIDED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
T, D, F = 128, 64, 192


def build_setting(recipe: Recipe, **fields: Any) -> Setting:
    return Setting(1, T, **{"tp": 2, "quantization": QuantizationConfig.model_validate(recipe.name)} | fields)


def build_linear(setting: Setting, module: str, out: int, width: int, role: Role) -> LinearParameters:
    own = derive_parameter_ownership(f"{module}.weight", (out, width), role, setting.tp, sequence_parallel=True)
    return LinearParameters(module, Parameter(own, ("F", "D")), recipe=setting.recipe)


def build_group(setting: Setting) -> Op:
    return derive_column_group(setting, [build_linear(setting, name, F, D, Column(Columns(32))) for name in ("a", "b")])


def build_row(setting: Setting) -> Op:
    return derive_row(setting, build_linear(setting, "c", D, F, Row(Columns(32))))


def describe(op: Op, phase: str) -> list[str]:
    """Every step in order, collectives with what they carry."""
    return [f"{s.what} {s.name}" if isinstance(s, Gemm) else f"{s.tensor}: {s.collective}" for s in getattr(op, phase)]


def test_block_scales_travel_with_their_numbers_and_need_no_agreement() -> None:
    """MXFP8: a byte a number and one for each 32 of them."""
    op = build_group(build_setting(MXFP8))
    row = D + D // 32
    assert describe(op, "forward") == [f"x: all_gather [{T}x{row}] uint8 over tp", "forward a", "forward b"]
    assert describe(op, "backward") == [
        f"x: all_gather [{T}x{row}] uint8 over tp",
        "dgrad a",
        "dgrad b",
        f"dx: reduce_scatter [{T}x{D}] bfloat16 over tp",
        "wgrad a",
        "wgrad b",
    ]
    assert [(saved.shape, saved.dtype) for saved in op.saved] == [((T // 2, row), "uint8")]


def test_a_row_linears_gradient_travels_both_ways_round() -> None:
    """Dgrad reads it in blocks along its features, wgrad along its tokens; each is rounded from the gradient itself."""
    op = build_row(build_setting(MXFP8))
    assert describe(op, "backward") == [f"dy: all_gather [{T}x{2 * (D + 2)}] uint8 over tp", "dgrad c", "wgrad c"]
    assert describe(build_row(build_setting(CURRENT)), "backward")[1] == f"dy: all_gather [{T}x{D}] uint8 over tp"
    assert [(saved.shape, saved.dtype) for saved in op.saved] == [((T, F // 2 + F // 2 // 32), "uint8")]


def test_magnitudes_of_what_is_cut_are_agreed_on_once_a_pass_before_anything_moves() -> None:
    """Forward: of the tokens and of two weights; backward: of both gradients. In all-reduce mode tokens are whole."""
    op = build_group(build_setting(CURRENT))
    assert describe(op, "forward")[:2] == [
        "amax: all_reduce max [3] float32 over tp",
        f"x: all_gather [{T}x{D}] uint8 over tp",
    ]
    assert describe(op, "backward")[:2] == [
        "amax: all_reduce max [2] float32 over tp",
        f"x: all_gather [{T}x{D}] uint8 over tp",
    ]
    other = build_group(build_setting(CURRENT, sequence_parallel=False))
    assert describe(other, "forward") == ["amax: all_reduce max [2] float32 over tp", "forward a", "forward b"]
    assert describe(other, "backward")[0] == "amax: all_reduce max [2] float32 over tp"


def test_a_row_linear_agrees_on_its_gradient_only_where_tokens_are_cut() -> None:
    op, other = (build_row(build_setting(CURRENT, sequence_parallel=mode)) for mode in (True, False))
    assert describe(op, "forward")[0] == describe(other, "forward")[0] == "amax: all_reduce max [2] float32 over tp"
    assert describe(op, "backward")[0] == "amax: all_reduce max [1] float32 over tp"
    assert describe(other, "backward") == ["dgrad c", "wgrad c"]


def test_what_wgrad_reads_mixed_has_a_magnitude_of_its_own() -> None:
    """NVFP4 with Hadamard: of x and dy two each, of a weight one; two numbers a byte, and a scale for each 16."""
    op = build_group(build_setting(NVFP4))
    row = D // 2 + D // 16
    assert describe(op, "forward")[:2] == [
        "amax: all_reduce max [4] float32 over tp",
        f"x: all_gather [{T}x{row}] uint8 over tp",
    ]
    assert describe(op, "backward")[0] == "amax: all_reduce max [4] float32 over tp"
    assert [count_amaxes(NVFP4, what) for what in ("input", "weight", "gradient")] == [2, 1, 2]
    plain = replace(NVFP4, hadamard=False)
    assert [count_amaxes(plain, what) for what in ("input", "weight", "gradient")] == [1, 1, 1]


def test_delayed_scales_are_current_ones_until_there_is_a_history_and_then_known() -> None:
    first = build_setting(DELAYED, is_calibrated=False)
    current = build_setting(CURRENT)
    for build in (build_group, build_row):
        for phase in ("forward", "backward"):
            assert describe(build(first), phase) == describe(build(current), phase)
            calibrated = describe(build(build_setting(DELAYED)), phase)
            assert calibrated == [line for line in describe(build(current), phase) if not line.startswith("amax")]


@DECIDED
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("build", [build_group, build_row])
def test_sums_move_as_before_and_gathers_shrink(recipe: Recipe, sequence_parallel: bool, build: object) -> None:
    assert callable(build)
    setting = build_setting(recipe, sequence_parallel=sequence_parallel)
    quantized, plain = build(setting), build(replace(setting, quantization=QuantizationConfig()))
    for phase in ("forward", "backward"):
        with_scales, without = (list_collectives(getattr(op, phase)) for op in (quantized, plain))
        moved = [each for each in with_scales if each.op == "sum"]
        assert [each.kind for each in moved] == [each.kind for each in without]
        both_ways = 2 if build is build_row and recipe.gradient.block else 1
        for one, other in zip(moved, without, strict=True):
            assert (one == other) == (one.kind is not Kind.ALL_GATHER)
            assert one == other or one.payload_bytes <= other.payload_bytes * both_ways * 33 / 64
    assert quantized.saved_bytes < plain.saved_bytes * 0.52
    assert quantized.recipe == recipe
    assert plain.recipe is None


@DECIDED
def test_one_rank_agrees_with_nobody(recipe: Recipe) -> None:
    setting = build_setting(recipe, tp=1, is_calibrated=False)
    for op in (build_group(setting), build_row(setting)):
        assert list_collectives((*op.forward, *op.backward)) == []


def test_rows_stand_for_both_where_there_are_no_blocks() -> None:
    gemms = ("dgrad", "wgrad")
    assert list_orientations(Operand("e5m2", "current"), gemms) == ("rows",)
    assert list_orientations(Operand("e5m2", "current"), ["wgrad"]) == ("rows",)
    assert list_orientations(Operand("e4m3", "block32"), gemms) == ("rows", "columns")
    assert list_orientations(Operand("e4m3", "block32"), ["wgrad"]) == ("columns",)
    assert list_orientations(Operand("e4m3", "block32"), ["forward"]) == ("rows",)
    assert list_orientations(Operand("e4m3", "block32"), []) == ()


def test_a_row_weighs_its_numbers_and_its_scales() -> None:
    """Of 64 numbers in bfloat16's 128 bytes."""
    weights = {name: count_row_bytes(recipe.gradient, ("dgrad", "wgrad"), 64) for name, recipe in RECIPES.items()}
    assert weights == {"fp8_currentscaling": 64, "fp8_delayedscaling": 64, "mxfp8": 132, "nvfp4": 72}


LLAMA = load_preset("llama-tiny").model_copy(update={"num_layers": 5})


def build_run(*overrides: str) -> RunConfig:
    return load_run_config("llama-tiny", ["model.num_layers=5", *overrides])


def count_bytes_gathered(ops: tuple[Op, ...]) -> list[str]:
    collectives = [each for op in ops for each in list_collectives((*op.forward, *op.backward))]
    return [each.dtype for each in collectives if each.kind is Kind.ALL_GATHER]


def test_first_and_last_blocks_and_the_head_stay_as_they_are() -> None:
    run = build_run("quantization=fp8_currentscaling", "parallel.tp=2", "quantization.keep_last=2")
    contract = derive_run_model(run)
    plain = derive_run_model(run.model_copy(update={"quantization": QuantizationConfig()}))
    assert [contract.is_kept(index) for index in range(5)] == [True, False, False, True, True]
    assert contract.kept_block == plain.block == plain.kept_block
    assert set(count_bytes_gathered(contract.block)) == {"uint8"}
    assert count_bytes_gathered(contract.exit) == ["bfloat16", "bfloat16"]
    kept, quantized = contract.kept_block, contract.block
    blocks = (*kept, *quantized, *quantized, *kept, *kept)
    assert contract.ops == (*contract.entry, *blocks, *contract.exit, contract.loss)
    assert contract.num_parameters == plain.num_parameters


def test_mlps_alone_or_the_head_too() -> None:
    base = ("quantization=fp8_currentscaling", "parallel.tp=2")
    mlps = derive_run_model(build_run(*base, "quantization.layers=mlp_only")).block
    assert {op.name for op in mlps if op.recipe} == {"layers.0.mlp.w_gate|w_up", "layers.0.mlp.w_down"}
    head = derive_run_model(build_run(*base, "quantization.head=true")).exit[-1]
    assert head.recipe == CURRENT
    assert count_bytes_gathered((head,)) == ["uint8", "uint8"]


def test_totals_of_a_step_count_both_kinds_of_blocks() -> None:
    run = build_run(
        "quantization=fp8_delayedscaling", "parallel.tp=2", "parallel.dp_replicate=2", "quantization.keep_first=2"
    )
    contract = derive_run_model(run)
    tally = build_step_tally(run, contract)
    assert tally.collectives == count_collectives(derive_step_collectives(run, contract))
    assert tally.micro_batch == build_tally(contract.ops)


@pytest.mark.parametrize(("tp", "dp"), [*product((1, 2), (1, 3))])
def test_histories_are_agreed_on_once_a_step_over_tp_and_over_dp(tp: int, dp: int) -> None:
    """Seven linears in each of three blocks, of three tensors each: 63 numbers, whatever the degrees."""
    run = build_run("quantization=fp8_delayedscaling", f"parallel.tp={tp}", f"parallel.dp_replicate={dp}")
    names = list_histories(derive_recipes(run.model, run.quantization))
    assert len(names) == len(set(names)) == 63
    assert "layers.1.attention.wq.gradient" in names
    closing = [str(each) for each in derive_closing_collectives(run, derive_run_model(run))]
    wanted = [f"all_reduce max [63] float32 over {axis}" for axis, size in (("tp", tp), ("dp", dp)) if size > 1]
    assert closing[len(closing) - len(wanted) :] == wanted
    assert sum("float32" in line and "max" in line for line in closing) == len(wanted)


def test_only_delayed_scales_have_a_history() -> None:
    run = build_run("quantization=fp8_currentscaling", "quantization.weight.scaling=delayed", "parallel.tp=2")
    names = list_histories(derive_recipes(run.model, run.quantization))
    assert len(names) == 21
    assert all(name.endswith(".weight") for name in names)
    other = build_run("quantization=mxfp8", "parallel.tp=2", "quantization.layers=mlp_only")
    closing = derive_closing_collectives(other, derive_run_model(other))
    assert not any(each.op == "max" and each.dtype == "float32" for each in closing)


def test_recipes_are_by_module_the_head_among_them() -> None:
    recipes = derive_recipes(LLAMA, QuantizationConfig(recipe="mxfp8", head=True, keep_first=2, keep_last=2))
    linears = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down")
    assert set(recipes) == {*(f"layers.2.{linear}" for linear in linears), "head"}
    assert set(recipes.values()) == {MXFP8}
    assert derive_recipes(LLAMA, QuantizationConfig()) == {}
    with pytest.raises(ConfigError, match=r"quantizes nothing: of 5 blocks the first 3 and the last 2 are kept"):
        derive_recipes(LLAMA, QuantizationConfig(recipe="mxfp8", keep_first=3, keep_last=2))


def test_linears_at_the_ends_of_a_region_are_selected_and_what_is_inside_is_not() -> None:
    roles: dict[str, Role] = {
        "h.0.a": Column(),
        "h.1.a": Column(),
        "h.1.c": InnerColumn(),
        "h.1.n": TokenLocal(),
        "h.1.b": Row(),
        "h.2.b": Row(),
    }
    chosen = select_linears(QuantizationConfig(recipe="mxfp8"), roles, count_blocks(roles))
    assert chosen == {"h.1.a": MXFP8, "h.1.b": MXFP8}


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_columns_of_mlps_are_cut_in_whole_blocks(tp: int) -> None:
    quantization = QuantizationConfig(recipe="mxfp8", layers="mlp_only")
    owners = derive_ownership(LLAMA, tp, quantization=quantization)
    plain = derive_ownership(LLAMA, tp)
    assert owners["layers.0.mlp.w_up.weight"].split == build_split(96, tp, 32)
    assert owners["layers.0.mlp.w_down.weight"].split == build_split(96, tp, 32)
    assert owners["layers.0.attention.wq.weight"] == plain["layers.0.attention.wq.weight"]
    mlps = [own for name, own in owners.items() if ".mlp." in name]
    assert [torn for own in mlps for torn in list_torn_blocks(MXFP8, own)] == []


def test_a_plan_is_aligned_wherever_columns_are_cut() -> None:
    roles = {"a": Column(group="g"), "b": Row(Columns(3)), "c": InnerColumn(), "d": FeatureNorm(), "e": TokenLocal()}
    aligned = align_plan(Plan(roles, sequence_parallel=False, regions=("r",)), MXFP8)
    assert aligned.resolved == {
        "a": Column(Columns(32), "g"),
        "b": Row(Columns(96)),
        "c": InnerColumn(Columns(32)),
        "d": FeatureNorm(Columns(32)),
        "e": TokenLocal(),
    }
    assert (aligned.sequence_parallel, aligned.regions) == (False, ("r",))
    plan = derive_plan(LLAMA)
    assert align_plan(plan, CURRENT) is plan


def test_torn_blocks_are_named_with_their_values() -> None:
    split = build_split(96, 4)
    assert list_torn_blocks(MXFP8, Ownership("w", (96, 64), 0, split)) == [
        "w: a rank would have output features 0:24, in blocks of 32"
    ]
    assert list_torn_blocks(NVFP4, Ownership("w", (64, 90))) == ["w: 90 input features are no whole blocks of 16"]
    assert list_torn_blocks(CURRENT, Ownership("w", (96, 64), 0, split)) == []


def test_ranks_own_whole_blocks_of_tokens_and_all_of_them_where_there_is_no_backward() -> None:
    quantization = QuantizationConfig(recipe="mxfp8")
    assert Setting(1, 160, tp=2, quantization=quantization).token_split.lengths == (96, 64)
    assert Setting(1, 7, tp=2, quantization=quantization).token_split.lengths == (4, 3)
    contract = derive_model(LLAMA, Setting(1, 7, tp=2, quantization=quantization))
    assert contract.block[1].inputs[0].layout.local_shape(0) == (4, 64)


def test_gradients_of_shared_heads_are_whole_before_they_are_quantized() -> None:
    """Each of two KV heads is on two ranks: what they have of its gradient is summed, and no parameter's after it."""
    config = load_preset("llama-tiny-gqa2").model_copy(update={"num_layers": 3})
    setting = Setting(1, T, tp=4, quantization=QuantizationConfig(recipe="fp8_currentscaling"))
    contract = derive_model(config, setting)
    qkv, plain = contract.block[1], contract.kept_block[1]
    assert [line for line in describe(qkv, "backward") if "all_reduce" in line] == [
        f"dy: all_reduce [{T}x8] bfloat16 over tp/kv",
        f"dy: all_reduce [{T}x8] bfloat16 over tp/kv",
        "amax: all_reduce max [3] float32 over tp",
    ]
    assert [line.partition(":")[0] for line in describe(plain, "backward") if "all_reduce" in line] == ["dwk", "dwv"]


def test_modes_and_degrees_of_a_whole_model_promise_what_their_operations_do() -> None:
    """Every gather of a quantized linear is in bytes, every other collective as without a recipe."""
    for name, mode in product(RECIPES, (True, False)):
        parallel = ParallelConfig(tp=2, sequence_parallel=mode)
        run = build_run(f"quantization={name}", "quantization.layers=mlp_only")
        run = run.model_copy(update={"parallel": parallel})
        moved = [each for each in derive_run_model(run).micro_batch_collectives if each.op == "sum" and each.dim == 0]
        plain = derive_run_model(run.model_copy(update={"quantization": QuantizationConfig()}))
        before = [each for each in plain.micro_batch_collectives if each.op == "sum" and each.dim == 0]
        assert [each.kind for each in moved] == [each.kind for each in before]
        changed = [one for one, other in zip(moved, before, strict=True) if one != other]
        assert {each.dtype for each in changed} == ({"uint8"} if mode else set())
        assert len(changed) == (3 * 3 if mode else 0)


def build_model(num_kv_heads: int, queries: int, head_width: int, width: int, mlp_width: int) -> LlamaConfig:
    sizes = {"num_kv_heads": num_kv_heads, "num_heads": num_kv_heads * queries, "head_width": head_width}
    sizes |= {"width": width, "mlp_width": 16 * mlp_width, "num_layers": 3, "vocab_size": 96}
    return LLAMA.model_copy(update=sizes)


@given(
    model=st.builds(
        build_model,
        num_kv_heads=st.integers(1, 4),
        queries=st.integers(1, 3),
        head_width=st.sampled_from([8, 16, 32, 48]),
        width=st.sampled_from([32, 48, 64]),
        mlp_width=st.integers(1, 12),
    ),
    tp=st.integers(1, 6),
    quantization=st.builds(
        QuantizationConfig,
        recipe=st.sampled_from(["fp8_currentscaling", "mxfp8", "nvfp4"]),
        layers=st.sampled_from(["all", "mlp_only"]),
        head=st.booleans(),
    ),
)
def test_what_a_config_lets_pass_tears_no_block_and_what_it_refuses_would(
    model: LlamaConfig, tp: int, quantization: QuantizationConfig
) -> None:
    """The config is checked before anything starts, from sizes; ownership is what runs."""
    problems = list(list_block_conflicts(model, ParallelConfig(tp=tp), quantization))
    try:
        owners = derive_ownership(model, tp, quantization=quantization)
    except ShardingError:
        assert problems or not _can_be_cut(model, tp)
        return
    recipes = derive_recipes(model, quantization)
    torn = [text for name, one in recipes.items() for text in list_torn_blocks(one, owners[f"{name}.weight"])]
    assert bool(torn) == bool(problems)


def _can_be_cut(model: LlamaConfig, tp: int) -> bool:
    try:
        derive_ownership(model, tp)
    except ShardingError:
        return False
    return True
