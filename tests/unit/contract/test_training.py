from plait.config.model import LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
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
