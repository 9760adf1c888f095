"""Sharding changes no quantized value: under every recipe a sharded model is its unsharded one, and says what it costs.

Both compute in float64 but for the quantizers, so a code that differs shows: it moves a gradient by 1e-3 and more,
where the budget is 1e-13.
"""

import pytest

from tests.support.verification import verify

ALL_BLOCKS = ("quantization.keep_first=0", "quantization.keep_last=0")

SIZES = {
    2: ("model.width=128", "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_width=224", "train.seq_len=32"),
    3: ("model.width=96", "model.num_heads=3", "model.num_kv_heads=3", "model.mlp_width=224", "train.seq_len=64"),
    4: ("model.width=128", "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_width=224", "train.seq_len=64"),
}
"""Heads of 32 features, as blocks of 32 need them. Seven blocks of MLP columns, and at tp = 3 four of tokens, are cut
unevenly; at tp = 4 two ranks share each KV head."""

RECIPES = ("fp8_currentscaling", "fp8_delayedscaling", "mxfp8", "nvfp4")

CUSTOM = {
    "e4m3 gradients": ("quantization=fp8_currentscaling", "quantization.gradient.format=e4m3"),
    "a format for each": (
        "quantization=mxfp8",
        "quantization.weight.format=e2m1",
        "quantization.weight.scaling=block16",
        "quantization.gradient.format=e5m2",
        "quantization.hadamard=true",
    ),
    "some look back": ("quantization=fp8_currentscaling", "quantization.weight.scaling=delayed"),
    "head and mlp": ("quantization=mxfp8", "quantization.layers=mlp_only", "quantization.head=true"),
}


def check(ranks, tp, *overrides, source="llama-tiny", sequence_parallel=True):
    report = verify(ranks(tp), source, tp, *SIZES[tp], *ALL_BLOCKS, *overrides, sequence_parallel=sequence_parallel)
    assert report.passed, report.failures
    assert report.budget.dtype == "float64"
    return report


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sharded_model_equals_unsharded_under_every_recipe(ranks, tp, recipe, sequence_parallel):
    check(ranks, tp, f"quantization={recipe}", sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("custom", CUSTOM)
def test_sharded_model_equals_unsharded_under_a_custom_recipe(ranks, custom):
    check(ranks, 2, *CUSTOM[custom])


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8"])
def test_model_with_biases_and_dropout_equals_unsharded(ranks, recipe):
    gpt = ("model.width=128", "model.num_heads=4", "train.seq_len=32")
    report = verify(ranks(2), "gpt-tiny", 2, *gpt, *ALL_BLOCKS, f"quantization={recipe}")
    assert report.passed, report.failures


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("tp", "transport", "method"), [(2, "ring", "direct"), (3, "shm", "direct"), (3, "ring", "ring_two_way")]
)
def test_overlapped_model_equals_unsharded(ranks, tp, transport, method, recipe):
    """Each chunk has its own scales."""
    report = check(
        ranks, tp, f"quantization={recipe}", "overlap=full", f"overlap.transport={transport}",
        f"overlap.method={method}", "train.micro_batch_size=4", "overlap.chunks=1" if tp == 3 else "overlap.chunks=2",
    )  # fmt: skip
    moved = [trace.num_promised for trace in report.traces if trace.what == "messages"]
    assert len(moved) == tp
    assert all(moved)
    assert all("emulated" in line.precision.kernel for line in report.receipt.lines if line.label != "head")


def test_blocks_that_are_kept_are_verified_too(ranks):
    """The integers are those of a block that is quantized."""
    report = verify(ranks(2), "llama-tiny", 2, *SIZES[2], "model.num_layers=3", "quantization=mxfp8")
    assert report.passed, report.failures
    gradients = {error.name: error.error for error in report.recipe_errors if error.quantity == "gradient"}
    assert all(gradients[f"layers.{layer}.mlp.w_up.weight"] > 1e-3 for layer in range(3))


def test_delayed_scaling_is_verified_before_and_after_its_first_update(ranks):
    report = check(ranks, 2, "quantization=fp8_delayedscaling")
    quantities = {error.quantity for error in report.errors}
    assert quantities == {
        "logits", "loss", "gradient", "gradient norm", "update", "calibrated logits", "calibrated loss", "calibrated gradient",
        "calibrated gradient norm", "calibrated update",
    }  # fmt: skip
    first, calibrated = (trace for trace in report.traces if trace.rank == 0 and trace.what == "collectives")
    assert calibrated.num_promised < first.num_promised, "no magnitudes but those of the update"


def test_what_a_recipe_does_is_stated_by_kind_of_tensor(ranks):
    """Fewer bits, more error: of fp8 and mxfp8 some percent, of nvfp4 several times as much."""
    errors = {}
    for recipe in ("fp8_currentscaling", "mxfp8", "nvfp4"):
        rows = {row.what: row.worst.error for row in check(ranks, 2, f"quantization={recipe}").recipe_rows}
        assert set(rows) >= {"loss", "logits", "gradient norm", "gradient of layers.*.mlp"}
        errors[recipe] = rows["logits"]
    assert 1e-3 < errors["mxfp8"] < errors["nvfp4"] / 2
    assert errors["fp8_currentscaling"] < errors["nvfp4"] / 2


def test_nothing_is_stated_without_a_recipe(ranks):
    report = verify(ranks(2), "llama-tiny", 2, "model.num_layers=1")
    assert not report.recipe_errors
