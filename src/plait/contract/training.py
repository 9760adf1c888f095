"""What a rank issues in a whole optimizer step of a run: its micro-batches, then what happens once."""

from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.model import ModelContract, derive_model, derive_recipes
from plait.contract.quantization import list_histories
from plait.contract.setting import Setting
from plait.contract.step import REDUCE
from plait.sharding import Invariant, Shard, derive_transition

_GATHER = derive_transition(Shard(0), Invariant()).forward


def build_setting(run: RunConfig, tp_rank: int = 0, *, is_calibrated: bool = True) -> Setting:
    """The circumstances of tp rank `tp_rank` in `run`."""
    return Setting(
        batch=run.train.micro_batch_size,
        seq_len=run.seq_len,
        tp=run.parallel.tp,
        rank=tp_rank,
        sequence_parallel=run.parallel.sequence_parallel,
        dtype=run.precision.compute,
        reduce_dtype=run.precision.reduce_dtype,
        quantization=run.quantization,
        is_calibrated=is_calibrated,
        recompute=run.train.recompute,
    )


def derive_run_model(run: RunConfig, tp_rank: int = 0, *, block: int = 0, is_calibrated: bool = True) -> ModelContract:
    """What tp rank `tp_rank` does for one micro-batch of `run`; `block` is the one whose names stand for all.

    `is_calibrated` is false in the first step of a run that scales by earlier ones.
    """
    is_smoothed = run.train.label_smoothing > 0
    setting = build_setting(run, tp_rank, is_calibrated=is_calibrated)
    return derive_model(run.model, setting, block=block, label_smoothing=is_smoothed)


def derive_step_collectives(run: RunConfig, contract: ModelContract) -> tuple[Collective, ...]:
    """What the rank issues in one step of `run`, in order."""
    micro_batches = contract.micro_batch_collectives * run.train.gradient_accumulation
    return (*micro_batches, *derive_closing_collectives(run, contract))


def derive_closing_collectives(run: RunConfig, contract: ModelContract) -> tuple[Collective, ...]:
    """What the rank issues once a step: totals, gradients over dp and cp, the gradient norm, largest magnitudes."""
    (axis, dp), dtype = _find_sums(run), contract.setting.sum_dtype
    over_dp = (Collective(REDUCE, axis, dp, (contract.num_parameters,), dtype),) if dp > 1 else ()
    norm, histories = derive_grad_norm_collectives(contract.setting), derive_history_collectives(run)
    return (*_derive_totals(run), *over_dp, *norm, *histories)


def derive_grad_norm_collectives(setting: Setting) -> tuple[Collective, ...]:
    """The one collective of the gradient norm: the sum of squares of what each rank counts."""
    return (Collective(REDUCE, "tp", setting.tp, (1,), setting.statistics_dtype),) if setting.tp > 1 else ()


def derive_history_collectives(run: RunConfig) -> tuple[Collective, ...]:
    """The largest magnitudes of a step, which delayed scales will look back at: one over tp, one over dp and cp."""
    recipe = run.quantization.resolved
    if recipe is None or not recipe.is_delayed:
        return ()
    number = len(list_histories(derive_recipes(run.model, run.quantization)))
    return tuple(
        Collective(REDUCE, axis, degree, (number,), "float32", op="max")
        for axis, degree in (("tp", run.parallel.tp), _find_sums(run))
        if degree > 1
    )


def _derive_totals(run: RunConfig) -> list[Collective]:
    """Loss, number of targets and wish to stop: gathered over dp and cp, and the most of them over tp."""
    (axis, dp), tp = _find_sums(run), run.parallel.tp
    over_dp = [Collective(_GATHER, axis, dp, (dp, 3), "float64")] if dp > 1 else []
    over_tp = [Collective(REDUCE, "tp", tp, (3,), "float64", op="max")] if tp > 1 else []
    return [*over_dp, *over_tp]


def _find_sums(run: RunConfig) -> tuple[str, int]:
    """The axis over which losses and gradients are summed, and how many ranks it has."""
    shape = run.parallel.mesh_shape
    return shape.sums, shape.degree("dp_cp")
