"""Which linears of a model are quantized, what of that is refused, and what they share."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from plait.config.quantization import QuantizationConfig
from plait.config.recipe import RECIPES
from plait.contract.plan import Column, Plan, Row
from plait.errors import ConfigError
from plait.overlap.fused import find_obstacle
from plait.overlap.site import Precision, Site
from plait.parallel.apply import parallelize, record_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.precision.model import update_amax_history
from plait.parallel.precision.scheme import GradientNoise, draw_signs
from plait.parallel.region.matrix import QuantizedMatrix
from plait.parallel.region.quantizer import Needs
from plait.quant.linear import QuantizedLinear, find_kernels
from plait.schedule.step import Content
from plait.schedule.work import Operation, derive_work
from plait.sharding import Interval, Invariant, Partial, QueryHeads, Replicate, Shard, derive_transition
from tests.support.lone_mesh import build_lone_mesh
from tests.support.quantized import FEATURES, TOKENS, WIDTH, Model, build_config, build_model, build_plan, draw


def refuse(said: str, quantization: Any, plan: Plan | None = None, tp: int = 1) -> None:
    plan = plan or build_plan(sequence_parallel=False)
    with pytest.raises(ConfigError, match=said):
        parallelize(Model(), build_lone_mesh(tp), plan, quantization=quantization)


def test_strict_refuses_a_device_that_emulates() -> None:
    refuse("cpu has no kernel for e4m3 x e4m3", build_config("mxfp8", strict=True))


def test_blocks_that_would_be_torn_are_refused_all_at_once() -> None:
    """Ten heads of 16 over three ranks are 4, 3 and 3; columns of an MLP would be cut in blocks instead."""
    heads = QueryHeads(10, 10, 16)
    roles: dict[str, Any] = {
        "layers.*.mlp.left": Column(heads, group="in"),
        "layers.*.mlp.right": Column(heads, group="in"),
        "layers.*.mlp.down": Row(heads),
    }
    said = r"(?s)6 problems.*layers.0.mlp.left.weight: a rank would have output features 64:112, in blocks of 32"
    refuse(said, build_config("mxfp8"), Plan(roles, sequence_parallel=False), tp=3)


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    refuse("quantization: recipe .* 'mxfp8' or 'nvfp4'", "fp8")


def test_what_is_no_recipe_is_refused_in_words_of_a_config() -> None:
    refuse("quantization: keep_frst is no known key", {"recipe": "mxfp8", "keep_frst": 1})
    refuse("quantization: should be the name of a recipe, a table or a QuantizationConfig", None)
    options = {"recipe": "fp8_currentscaling", "margin": 1, "input": {"format": "e2m1"}}
    refuse(r"(?s)2 problems.*too few .* \(use block16 or block32\).*margin only delayed", options)


def test_nothing_to_quantize_is_refused() -> None:
    refuse("quantizes nothing: of 2 blocks", QuantizationConfig(recipe="mxfp8"))


def test_a_group_is_quantized_as_a_whole() -> None:
    model = Model()
    model.layers[0].other = nn.Linear(WIDTH, 160)
    roles: dict[str, Any] = {
        **build_plan(sequence_parallel=False).roles,
        "layers.*.mlp.left": Column(),
        "layers.*.mlp.right": Column(),
        "layers.0.other": Column(),
    }
    config = build_config("fp8_currentscaling", layers="mlp_only")
    record = record_of(
        parallelize(model, build_lone_mesh(1), Plan(roles, sequence_parallel=False), quantization=config)
    )
    assert record is not None
    assert record.precision is not None
    assert "layers.0.other" not in record.precision.recipes
    with pytest.raises(ConfigError, match=r"layers.0.mlp.left is quantized and layers.0.other is not"):
        record.precision.build_entry_quantizer(["layers.0.mlp.left", "layers.0.other"], "in", None, [None, None])  # type: ignore[arg-type]


def test_on_one_rank_selected_linears_are_quantized_ones() -> None:
    model = build_model(build_lone_mesh(1), build_config("mxfp8"), sequence_parallel=False)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 6
    assert list(model.state_dict()) == list(Model().state_dict())


def test_what_is_drawn_has_to_be_seeded() -> None:
    """Nothing is drawn from a generator: without a seed and a place in the run there is no noise."""
    model = parallelize(
        Model(), build_lone_mesh(1), build_plan(sequence_parallel=False), quantization=build_config("nvfp4")
    )
    x = draw(TOKENS, WIDTH, seed=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match="the Hadamard transform has no signs") as caught:
        model(x)
    assert "plait.seed_dropout" in str(caught.value)
    seed_dropout(model, 1)
    y = model(x)
    with pytest.raises(ConfigError, match="stochastic rounding has no numbers to go by"):
        y.sum().backward()
    set_dropout_offset(model, 0)
    model(x).sum().backward()


def test_a_cut_gradient_is_rounded_by_its_part_of_one_noise() -> None:
    whole = GradientNoise(3, "here", 32, Interval(0, 10), 10).draw("rows", (64, 10), torch.device("cpu"))
    part = GradientNoise(3, "here", 48, Interval(4, 7), 10).draw("rows", (16, 3), torch.device("cpu"))
    assert torch.equal(part, whole[16:32, 4:7])
    assert 0 <= whole.min() <= whole.max() < 1
    assert abs(float(whole.mean()) - 0.5) < 0.05  # 640 uniform numbers: 4 standard deviations
    others = [
        GradientNoise(4, "here", 32, Interval(0, 10), 10).draw("rows", (64, 10), torch.device("cpu")),
        GradientNoise(3, "there", 32, Interval(0, 10), 10).draw("rows", (64, 10), torch.device("cpu")),
        GradientNoise(3, "here", 96, Interval(0, 10), 10).draw("rows", (64, 10), torch.device("cpu")),
        GradientNoise(3, "here", 32, Interval(0, 10), 10).draw("columns", (64, 10), torch.device("cpu")),
    ]
    assert not any(torch.equal(whole, other) for other in others)


def test_signs_are_a_function_of_the_seed() -> None:
    signs = draw_signs(5, "cpu")
    assert signs.shape == (16,)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert torch.equal(signs, draw_signs(5, "cpu"))
    assert not torch.equal(signs, draw_signs(6, "cpu"))


def test_histories_are_the_largest_magnitudes_of_steps() -> None:
    """Of the micro-batches of a step the largest; a step without a backward leaves them as they are."""
    model = build_model(build_lone_mesh(1), build_config("fp8_delayedscaling", amax_history=2), sequence_parallel=False)
    record = record_of(model)
    assert record is not None
    assert record.precision is not None
    histories = record.precision.histories
    assert histories is not None
    name = "layers.0.mlp.left.input"
    place = histories.names.index(name)
    x = draw(TOKENS, WIDTH, seed=1)
    largest = float(x.abs().max())
    assert histories.find_amax(name) is None
    for factors in ([1.0, 3.0], [2.0], [0.5]):
        for factor in factors:
            model(factor * x).sum().backward()
        update_amax_history(model)
        assert histories.values[place, 0] == pytest.approx(max(factors) * largest)
    assert histories.find_amax(name) == pytest.approx(2 * largest)
    before = histories.values.clone()
    with torch.no_grad():
        model(100 * x)
    update_amax_history(model)
    assert torch.equal(histories.values, before)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "native"), (torch.float64, "emulation")])
def test_what_multiplies_goes_by_the_dtype_of_a_pass(dtype: torch.dtype, kernel: str) -> None:
    """Not by that which the weights had once: no kernel sums in float64."""
    model = build_model(build_lone_mesh(1), build_config("fp8_currentscaling"), sequence_parallel=False)
    record = record_of(model)
    assert record is not None
    assert record.precision is not None
    quantizer = record.precision.build_exit_quantizer("layers.0.mlp.down", Invariant())
    x, weight = draw(TOKENS, FEATURES, seed=1, dtype=dtype), draw(WIDTH, FEATURES, seed=2, dtype=dtype)
    find_kernels.cache_clear()
    with patch("plait.quant.linear.find_capability", return_value=(9, 0)):
        read = quantizer.read(x, TOKENS, [weight], Needs(True, [True], [False])).x
    find_kernels.cache_clear()
    assert isinstance(read, QuantizedMatrix)
    assert read.kernel == kernel


def test_a_copy_of_a_model_has_histories_of_its_own() -> None:
    model = build_model(build_lone_mesh(1), build_config("fp8_delayedscaling"), sequence_parallel=False)
    other = copy.deepcopy(model)
    other(draw(TOKENS, WIDTH, seed=1)).sum().backward()
    update_amax_history(other)
    records = [record_of(each) for each in (model, other)]
    empty = [
        record.precision.histories.find_amax("layers.1.mlp.down.weight") is None
        for record in records
        if record is not None and record.precision is not None and record.precision.histories is not None
    ]
    assert empty == [True, False]


def test_fused_operations_do_no_quantized_pass() -> None:
    precision = Precision(RECIPES["mxfp8"], "emulated, float32 accumulator", "cpu has no kernel")
    site = Site("here", "mlp", 64, 64, "bfloat16", precision=precision)
    work = derive_work(Operation.COLUMN_FORWARD, derive_transition(Shard(0), Replicate()), 64, 2, 32)
    said = find_obstacle(work, {}, site, build_lone_mesh(2).tp)
    assert said == "it moves numbers of one dtype, and mxfp8 bytes of numbers and scales"


def test_costs_and_receipts_go_by_the_bytes_that_travel() -> None:
    """A row of 64 numbers: 64 bytes and 2 scales each way it lies in blocks; gradients for two GEMMs both ways."""
    precision = Precision(RECIPES["mxfp8"], "emulated, float32 accumulator", "cpu has no kernel")
    site = Site("here", "mlp", 64, 96, "float32", precision=precision)
    entry, exit = derive_transition(Shard(0), Replicate()), derive_transition(Partial(), Shard(0))
    weighs = {
        operation: site.gathered_row_bytes(derive_work(operation, transition, 64, 2, 32))
        for operation, transition in (
            (Operation.COLUMN_FORWARD, entry),
            (Operation.COLUMN_BACKWARD, entry),
            (Operation.ROW_BACKWARD, exit),
        )
    }
    assert list(weighs.values()) == [66, 66, 132]
    assert site.row_bytes(Content.ADDEND) == 64 * 4
