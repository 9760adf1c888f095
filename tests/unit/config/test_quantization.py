"""Precision recipes as they are written: what a run makes of them, and what it refuses before anything starts."""

from pathlib import Path

import pytest

from plait.config import QuantizationConfig, RunConfig, load_run_config
from plait.config.file.format import format_run_config
from plait.config.recipe import RECIPES, Operand
from plait.errors import ConfigError

ENOUGH = ("model.num_layers=3",)
"""So that a block between the first and the last is quantized."""


def load(*overrides: str) -> RunConfig:
    return load_run_config("llama-tiny", [*ENOUGH, *overrides])


def read_error(*overrides: str, source: str = "llama-tiny") -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_a_plain_value_stands_for_the_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'quantization = "{name}"\n[model]\npreset = "llama-tiny"\nnum_layers = 3\n')
    assert load(f"quantization={name}").quantization.resolved == RECIPES[name]
    assert load_run_config(str(file)).quantization == load(f"quantization.recipe={name}").quantization


def test_nothing_is_quantized_unless_asked_for() -> None:
    assert load().quantization.resolved is None
    assert load("quantization=none", "quantization.layers=mlp_only").quantization.resolved is None


def test_a_recipe_may_be_changed_in_parts_and_then_says_so() -> None:
    both_ways = load("quantization=fp8_currentscaling", "quantization.gradient.format=e4m3").quantization.resolved
    assert both_ways is not None
    assert both_ways.name == "fp8_currentscaling, changed"
    assert both_ways.gradient == Operand("e4m3", "current")
    assert both_ways.input == RECIPES["fp8_currentscaling"].input


def test_a_recipe_of_ones_own_says_all_six(tmp_path: Path) -> None:
    """What remains of the one it started from are options, which can be given as well."""
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "llama-tiny"\nnum_layers = 3\n[quantization]\nrecipe = "nvfp4"\nhadamard = false\n'
        '[quantization.input]\nformat = "e4m3"\nscaling = "delayed"\n'
        '[quantization.weight]\nformat = "e2m1"\nscaling = "block16"\n'
        '[quantization.gradient]\nformat = "e5m2"\nscaling = "block32"\n'
    )
    recipe = load_run_config(str(file)).quantization.resolved
    assert recipe is not None
    assert [str(operand) for operand in recipe.operands.values()] == ["e4m3 delayed", "e2m1 block16", "e5m2 block32"]
    assert (recipe.token_unit, recipe.feature_unit, recipe.hadamard, recipe.is_delayed) == (32, 32, False, True)


@pytest.mark.parametrize(
    "overrides",
    [
        ("quantization=mxfp8", "quantization.gradient.format=e5m2", "quantization.keep_first=0"),
        ("quantization=fp8_delayedscaling", "quantization.margin=1", "quantization.amax_history=4"),
        ("quantization=none",),
    ],
)
def test_a_run_is_written_as_it_was_given(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run, file = load(*overrides), tmp_path / "run.toml"
    file.write_text(format_run_config(run))
    assert load_run_config(str(file)) == run
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


MISTAKES = [
    (("quantization=mxfp9",), '"mxfp9" (command line): should be', 'did you mean "mxfp8"?'),
    (("quantization.recipee=mxfp8",), "unknown key", 'did you mean "recipe"?'),
    (("quantization=mxfp8", "quantization.gradient.formt=e5m2"), "unknown key", 'did you mean "format"?'),
    (("quantization.layers=mlp_only",), "nothing is quantized unless recipe says how", "recipes are fp8_current"),
    (("quantization=mxfp8", "quantization.margin=1"), "only delayed scaling looks back at earlier steps", ""),
    (("quantization=fp8_currentscaling", "quantization.input.format=e2m1"), "e2m1 has 8 magnitudes", "use block16"),
    (("quantization=mxfp8", "quantization.input.scaling=block16"), "block16 is for format e2m1", "use block32"),
    (("quantization=fp8_currentscaling", "quantization.hadamard=true"), "mixes sixteens of tokens", "block16 or"),
    (("quantization=mxfp8", "quantization.keep_last=2"), "of 3 blocks the first 1 and the last 2 are kept", "lower"),
    (
        ("quantization=mxfp8", "train.compile=true"),
        "are not compiled, and quantization.recipe is 'mxfp8'",
        "one of them",
    ),
    (("quantization=mxfp8", "train.seq_len=48"), "blocks of 32 tokens for wgrad, which the 48 of", "multiple of 32"),
    (("quantization=mxfp8", "parallel.tp=3"), "64 tokens of a micro-batch are 2 blocks of 32", "sequence_parallel"),
    (("quantization=mxfp8", "parallel.tp=2", "overlap=full", "overlap.chunks=2"), "in whole blocks of 32", "at most 1"),
    (("quantization=mxfp8", "model.width=80", "quantization.layers=mlp_only"), "blocks of 32 features, which", ""),
    (
        ("quantization=mxfp8", "model.mlp_width=100"),
        "[F, D]: 100 features are no whole number of blocks of 32",
        "use a recipe",
    ),
    (
        ("quantization=mxfp8", "model.mlp_width=32", "parallel.tp=2"),
        "[F, D]: 32 features in units of 32 cannot be cut over 2 ranks",
        "",
    ),
    (
        ("quantization=mxfp8", "parallel.tp=4", "train.seq_len=64", "train.micro_batch_size=2"),
        "wk [K*H, D]: one of 4 ranks would have features 0:8, cut within a block of 32",
        "use a recipe without blocks, or a degree that leaves whole blocks on every rank, or quantization.layers = mlp",
    ),
    (
        ("quantization=mxfp8", "quantization.head=true", "model.vocab_size=250"),
        "head [V, D]: 250 features are no whole number of blocks of 32",
        "use a recipe without blocks, or quantization.head = false",
    ),
]


@pytest.mark.parametrize(("overrides", "text", "hint"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_what_cannot_be_is_refused_before_anything_starts(overrides: tuple[str, ...], text: str, hint: str) -> None:
    error = read_error(*ENOUGH, *overrides)
    assert text in error
    assert hint in error


def test_all_of_it_is_refused_at_once() -> None:
    error = read_error("quantization=mxfp8", "parallel.tp=4", "train.seq_len=24")
    assert "llama-tiny: 5 problems" in error
    for text in ("quantizes nothing", "wq [N*H, D]", "wk [K*H, D]", "which the 24 of a micro-batch"):
        assert text in error


def test_one_scale_for_a_tensor_is_cut_anyhow() -> None:
    """No blocks: any degree, any number of tokens."""
    run = load("quantization=fp8_currentscaling", "parallel.tp=3", "train.seq_len=31", "quantization.head=true")
    assert run.quantization.resolved is not None


def test_heads_alone_may_be_quantized() -> None:
    run = load_run_config("llama-tiny", ["quantization=mxfp8", "quantization.head=true"])
    assert run.quantization.head


def test_mlps_alone_do_not_mind_narrow_heads() -> None:
    overrides = ("quantization=mxfp8", "parallel.tp=2")
    assert "wk [K*H, D]: one of 2 ranks would have features 0:16" in read_error(*ENOUGH, *overrides)
    assert load(*overrides, "quantization.layers=mlp_only").parallel.tp == 2


def test_a_config_is_a_value_whether_its_recipe_was_asked_for_or_not() -> None:
    one, other = QuantizationConfig(recipe="mxfp8"), QuantizationConfig.model_validate("mxfp8")
    assert one.resolved is not None
    assert one == other
    assert hash(one) == hash(other)
