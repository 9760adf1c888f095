from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.linear import LinearParameters, derive_column_group, derive_row
from plait.contract.op import Op
from plait.contract.parameter import Parameter, derive_parameter_ownership
from plait.contract.plan import Column, Role, Row
from plait.contract.report.linear import (
    Declaration,
    DeclaredLayout,
    LinearKind,
    LinearShape,
    derive_linear_cases,
    list_declarations,
)
from plait.contract.setting import Setting
from plait.contract.step import Gemm, list_collectives, list_gemms, sum_flops
from plait.errors import ShardingError
from plait.sharding import KeyValueHeads, QueryHeads

SHAPE = LinearShape(m=12, k=24, n=36)
COLUMN, ROW = LinearKind.COLUMN, LinearKind.ROW
R, T, F = DeclaredLayout.REPLICATED, DeclaredLayout.TOKEN_SHARDED, DeclaredLayout.FEATURE_SHARDED
DECLARATIONS = [Declaration(*parts) for parts in product(LinearKind, DeclaredLayout, DeclaredLayout)]


def build_linear(
    setting: Setting, module: str, out: int, width: int, *, role: Role, has_bias: bool = False
) -> LinearParameters:
    def own(name: str, *shape: int) -> Parameter:
        ownership = derive_parameter_ownership(name, shape, role, setting.tp, sequence_parallel=True)
        return Parameter(ownership, ("F", "D")[: len(shape)])

    bias = own(f"{module}.bias", out) if has_bias else None
    return LinearParameters(module, own(f"{module}.weight", out, width), bias)


def describe(op: Op, phase: str) -> list[str]:
    """`all_gather x`, `dgrad wq`: every step in order."""
    steps = getattr(op, phase)
    return [
        f"{s.what} {s.name}" if isinstance(s, Gemm) else f"{s.collective.kind} {s.tensor} over {s.collective.axis}"
        for s in steps
    ]


def test_a_gather_group_gathers_once_and_reduces_once() -> None:
    setting = Setting(1, 12, tp=2)
    gate, up = (build_linear(setting, name, 16, 8, role=Column()) for name in ("gate", "up"))
    op = derive_column_group(setting, [gate, up])
    assert describe(op, "forward") == ["all_gather x over tp", "forward gate", "forward up"]
    assert describe(op, "backward") == [
        "all_gather x over tp",
        "dgrad gate",
        "dgrad up",
        "reduce_scatter dx over tp",
        "wgrad gate",
        "wgrad up",
    ]


def test_only_the_shard_of_the_input_is_kept() -> None:
    setting = Setting(1, 7, tp=2, rank=1)
    op = derive_column_group(setting, [build_linear(setting, "up", 16, 8, role=Column())])
    assert [(saved.name, saved.shape) for saved in op.saved] == [("x", (3, 8))]


def test_all_reduce_mode_moves_nothing_forward_and_the_input_gradient_backward() -> None:
    setting = Setting(1, 12, tp=2, sequence_parallel=False)
    op = derive_column_group(setting, [build_linear(setting, "up", 16, 8, role=Column())])
    assert describe(op, "forward") == ["forward up"]
    assert describe(op, "backward") == ["dgrad up", "all_reduce dx over tp", "wgrad up"]


def test_gradients_of_shared_kv_heads_are_summed_member_by_member_after_everything_else() -> None:
    setting = Setting(1, 12, tp=4, rank=3)
    heads = (8, 2, 4)
    q = build_linear(setting, "wq", 32, 8, role=Column(QueryHeads(*heads)), has_bias=True)
    k, v = (
        build_linear(setting, name, 8, 8, role=Column(KeyValueHeads(*heads)), has_bias=True) for name in ("wk", "wv")
    )
    op = derive_column_group(setting, [q, k, v])
    assert describe(op, "backward")[-4:] == [
        "all_reduce dwk over tp/kv",
        "all_reduce dwk.bias over tp/kv",
        "all_reduce dwv over tp/kv",
        "all_reduce dwv.bias over tp/kv",
    ]
    sums = [c for c in list_collectives(op.backward) if c.axis == "tp/kv"]
    assert [(c.shape, c.degree) for c in sums] == [((4, 8), 2), ((4,), 2)] * 2


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        (True, ["forward down", "reduce_scatter y over tp"], ["all_gather dy over tp", "dgrad down", "wgrad down"]),
        (False, ["forward down", "all_reduce y over tp"], ["dgrad down", "wgrad down"]),
    ],
)
def test_a_row_linear_reduces_its_output_and_its_bias_moves_nothing(
    sequence_parallel: bool, forward: list[str], backward: list[str]
) -> None:
    setting = Setting(1, 12, tp=2, sequence_parallel=sequence_parallel)
    op = derive_row(setting, build_linear(setting, "down", 8, 16, role=Row(), has_bias=True))
    assert describe(op, "forward") == forward
    assert describe(op, "backward") == backward


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=str)
def test_one_rank_moves_nothing(declaration: Declaration) -> None:
    (case,) = derive_linear_cases(SHAPE, [1], declaration, "float32")
    assert list_collectives((*case.ops[0].forward, *case.ops[0].backward)) == []


@given(st.integers(1, 6), st.tuples(*[st.integers(6, 40)] * 3), st.sampled_from(DECLARATIONS))
def test_ranks_share_the_work_and_own_the_weight_once(
    tp: int, sizes: tuple[int, int, int], declaration: Declaration
) -> None:
    shape = LinearShape(*sizes)
    (case,) = derive_linear_cases(shape, [tp], declaration, "float32")
    whole = 2 * shape.m * shape.k * shape.n
    assert sum(sum_flops(op.forward) for op in case.ops) == whole
    assert sum(sum_flops(op.backward) for op in case.ops) == 2 * whole
    (weight,) = {op.parameters[0].ownership for op in case.ops}
    assert sum(weight.local_shape(rank)[0] * weight.local_shape(rank)[1] for rank in range(tp)) == shape.k * shape.n


@given(st.integers(2, 6), st.sampled_from(DECLARATIONS))
def test_gemms_of_a_rank_fit_its_local_shapes(tp: int, declaration: Declaration) -> None:
    (case,) = derive_linear_cases(SHAPE, [tp], declaration, "float32")
    for setting, op in zip(case.settings, case.ops, strict=True):
        out, width = op.parameters[0].ownership.local_shape(setting.rank)
        forward, dgrad, wgrad = list_gemms((*op.forward, *op.backward))
        assert (forward.m, forward.k, forward.n) == (SHAPE.m, width, out)
        assert (dgrad.m, dgrad.k, dgrad.n) == (SHAPE.m, out, width)
        assert (wgrad.m, wgrad.k, wgrad.n) == (out, SHAPE.m, width)


@pytest.mark.parametrize(
    ("declaration", "forward", "backward"),
    [
        (Declaration(COLUMN, R, F), [], ["all_reduce dx"]),
        (Declaration(COLUMN, R, R), ["all_gather y"], ["all_reduce dx"]),
        (Declaration(COLUMN, T, F), ["all_gather x"], ["all_gather x", "reduce_scatter dx"]),
        (Declaration(COLUMN, R, T), ["all_to_all y"], ["all_to_all dy", "all_reduce dx"]),
        (Declaration(ROW, F, R), ["all_reduce y"], []),
        (Declaration(ROW, F, T), ["reduce_scatter y"], ["all_gather dy"]),
        (Declaration(ROW, R, R), ["all_reduce y"], ["all_gather dx"]),
        (Declaration(ROW, T, R), ["all_to_all x", "all_reduce y"], ["all_to_all dx"]),
    ],
)
def test_the_collectives_follow_the_declared_layouts(
    declaration: Declaration, forward: list[str], backward: list[str]
) -> None:
    (case,) = derive_linear_cases(SHAPE, [3], declaration, "float32")
    moves = [
        [step.removesuffix(" over tp") for step in describe(case.ops[2], phase) if "over" in step]
        for phase in ("forward", "backward")
    ]
    assert moves == [forward, backward]


def test_layouts_that_are_not_declared_are_those_between_transformer_layers() -> None:
    assert list_declarations(COLUMN, None, None) == [Declaration(COLUMN, R, F), Declaration(COLUMN, T, F)]
    assert list_declarations(ROW, None, None) == [Declaration(ROW, F, R), Declaration(ROW, F, T)]
    assert list_declarations(ROW, T, None) == [Declaration(ROW, T, R), Declaration(ROW, T, T)]
    assert list_declarations(COLUMN, R, R) == [Declaration(COLUMN, R, R)]


@pytest.mark.parametrize(
    ("declaration", "dim"),
    [
        (Declaration(COLUMN, R, F), "N = 36"),
        (Declaration(ROW, F, R), "K = 24"),
        (Declaration(COLUMN, T, F), "M = 12"),
    ],
)
def test_a_rank_without_a_part_is_refused(declaration: Declaration, dim: str) -> None:
    with pytest.raises(ShardingError, match=rf"{declaration}: {dim} cannot be cut over 40"):
        derive_linear_cases(SHAPE, [40], declaration, "float32")
