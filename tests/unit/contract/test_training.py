import pytest

from plait.config.model import LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.contract.report.sent import build_sent
from plait.contract.report.tally import build_tally, count_collectives
from plait.contract.report.training import build_step_tally
from plait.contract.training import build_setting, derive_run_model, derive_step_collectives

MODEL = LlamaConfig(num_layers=2, width=64, num_heads=8, num_kv_heads=4, mlp_width=96, vocab_size=256, max_seq_len=64)


def build_run(**parallel: int) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(reduce="float32"),
        train=TrainConfig(micro_batch_size=2, seq_len=16, gradient_accumulation=3, label_smoothing=0.1),
    )


def test_the_setting_is_that_of_the_run() -> None:
    setting = build_setting(build_run(tp=4, dp_replicate=2), tp_rank=3)
    assert (setting.num_tokens, setting.tp, setting.rank) == (32, 4, 3)
    assert (setting.dtype, setting.reduce_dtype, setting.sequence_parallel) == ("bfloat16", "float32", True)


def test_a_step_repeats_the_micro_batch_and_ends_with_what_happens_once() -> None:
    run = build_run(tp=2, dp_replicate=4)
    contract = derive_run_model(run)
    collectives = derive_step_collectives(run, contract)
    each = contract.micro_batch_collectives
    assert collectives[: 3 * len(each)] == each * 3
    assert [str(collective) for collective in collectives[3 * len(each) :]] == [
        "all_gather [4x3] float64 over dp",
        "all_reduce max [3] float64 over tp",
        f"all_reduce [{contract.num_parameters}] float32 over dp",
        f"all_reduce [{5 * MODEL.width}] float32 over tp",
        "all_reduce [1] float32 over tp",
    ]


def test_a_step_of_one_rank_issues_nothing() -> None:
    run = build_run()
    assert derive_step_collectives(run, derive_run_model(run)) == ()


def test_totals_of_a_step() -> None:
    run = build_run(tp=2)
    contract = derive_run_model(run)
    tally = build_step_tally(run, contract)
    collectives = derive_step_collectives(run, contract)
    assert tally.collectives == count_collectives(collectives)
    assert tally.micro_batch == build_tally(contract.ops)
    T, matrices = 32, MODEL.num_parameters - MODEL.vocab_size * MODEL.width - 5 * MODEL.width
    attention = 4 * 2 * 16**2 * 64 * MODEL.num_layers
    assert tally.flops == 3 * 3 * (2 * T * matrices + attention) // 2


@pytest.mark.parametrize(
    ("compute", "parallel", "bytes_each"),
    [
        ("bfloat16", {"tp": 2}, 2 + 4 + 4 + 2 * 4),
        ("float32", {"tp": 2}, 4 + 4 + 2 * 4),
        ("bfloat16", {"dp_shard": 4}, (4 + 4 + 2 * 4) / 4),
        ("bfloat16", {"dp_shard": 2, "cp": 2, "dp_replicate": 2}, (4 + 4 + 2 * 4) / 4),
    ],
)
def test_the_state_is_parameters_gradients_and_what_the_optimizer_keeps(
    compute: str, parallel: dict[str, int], bytes_each: float
) -> None:
    run = build_run(**parallel).model_copy(update={"precision": PrecisionConfig(compute=compute)})
    tally = build_step_tally(run, derive_run_model(run))
    assert tally.state_bytes == bytes_each * tally.num_parameters


@pytest.mark.parametrize("reshard", [True, False])
def test_what_dp_shard_shares_out_is_gathered_and_reduced_unit_by_unit(reshard: bool) -> None:
    """The last block is gathered again when backward begins, each other when it comes to the block behind it."""
    run = build_run(dp_shard=2, dp_replicate=2, reshard_after_forward=reshard)
    collectives = [str(each) for each in derive_step_collectives(run, derive_run_model(run))]
    block, root = MODEL.width * (2 * 64 + 2 * 32 + 3 * 96 + 2), MODEL.width * (2 * MODEL.vocab_size + 1)
    gathers = [f"all_gather [{size}] bfloat16 over dp_shard" for size in (root, block, block)]
    again = gathers[1:] if reshard else []
    reduces = [
        text
        for size in (block, block, root)
        for text in (
            f"reduce_scatter [{size}] float32 over dp_shard",
            f"all_reduce [{size // 2}] float32 over dp_replicate",
        )
    ]
    last = [*again[:1], *again[1:], *reduces]
    assert collectives[: 2 * len([*gathers, *again])] == [*gathers, *again] * 2
    assert collectives[2 * len([*gathers, *again]) :] == [
        *gathers,
        *last,
        "all_gather [4x3] float64 over dp",
        "all_reduce [1] float32 over dp_shard",
    ]


@pytest.mark.parametrize(
    ("pp_rank", "end"), [(0, MODEL.vocab_size * MODEL.width), (1, MODEL.width * (MODEL.vocab_size + 1))]
)
def test_stages_that_share_out_their_parameters_are_gathered_and_reduced_once_a_step(pp_rank: int, end: int) -> None:
    """Whatever the number of micro-batches: before the first pass, and after the last."""
    run = build_run(pp=2, dp_shard=2)
    collectives = [str(each) for each in derive_step_collectives(run, derive_run_model(run), pp_rank)]
    block = MODEL.width * (2 * 64 + 2 * 32 + 3 * 96 + 2)
    assert collectives == [
        *(f"all_gather [{size}] bfloat16 over dp_shard" for size in (end, block)),
        "all_gather [2x3] float64 over dp",
        "all_reduce [3] float64 over pp",
        *(f"reduce_scatter [{size}] float32 over dp_shard" for size in (block, end)),
        "all_reduce [1] float32 over dp_shard",
        "all_reduce [1] float32 over pp",
    ]


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 4, "tp": 2},
        {"dp_shard": 2, "dp_replicate": 4, "reshard_after_forward": False},
        {"pp": 2, "dp_shard": 2, "dp_replicate": 2, "tp": 2},
    ],
)
def test_a_step_that_is_shared_out_adds_up(parallel: dict[str, int]) -> None:
    run = build_run(**parallel)
    contract = derive_run_model(run)
    for pp_rank in range(run.parallel.pp):
        tally = build_step_tally(run, contract, pp_rank)
        assert tally.collectives == count_collectives(derive_step_collectives(run, contract, pp_rank))
        assert build_sent(run, contract, pp_rank).total == pytest.approx(tally.collectives.sent_bytes)
