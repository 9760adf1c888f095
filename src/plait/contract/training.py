"""What a rank issues in a whole optimizer step of a run: its micro-batches, then what happens once."""

from collections.abc import Sequence

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import (
    count_share,
    derive_shared_collectives,
    derive_step_gathers,
    derive_step_reduces,
)
from plait.contract.axis.replicas import derive_replica_copies
from plait.contract.axis.totals import derive_totals, find_sums
from plait.contract.collective import Collective
from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import CAUSAL, AttentionMask
from plait.contract.context.sequences import Sequences
from plait.contract.model import ModelContract, derive_model, derive_recipes
from plait.contract.pipeline.stage import count_parameters, select_modules
from plait.contract.pipeline.step import derive_stage_collectives, select_run_parts
from plait.contract.quantization import list_histories
from plait.contract.setting import Setting
from plait.contract.step import REDUCE
from plait.sharding.token_order import Order, build_order

ENDS = "pp/ends"
"""The axis of the first and the last rank of a pipeline."""


def build_setting(
    run: RunConfig, tp_rank: int = 0, cp_rank: int = 0, *, mask: AttentionMask = CAUSAL, is_calibrated: bool = True
) -> Setting:
    """The circumstances of the rank at `tp_rank` and `cp_rank` in `run`, where `mask` says what sees what."""
    order = build_order(Order(run.context.order), run.seq_len, run.parallel.cp)
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
        sequences=Sequences(order, cp_rank, mask) if run.parallel.cp > 1 else None,
        context_method=ContextMethod(run.context.method),
    )


def derive_run_model(
    run: RunConfig,
    tp_rank: int = 0,
    cp_rank: int = 0,
    *,
    mask: AttentionMask = CAUSAL,
    block: int = 0,
    is_calibrated: bool = True,
) -> ModelContract:
    """What a rank does for one micro-batch of `run`; `block` is the one whose names stand for all.

    `mask` tells of its documents: what no rank of a context axis needs does not move. `is_calibrated` is false in the
    first step of a run that scales by earlier ones.
    """
    is_smoothed = run.train.label_smoothing > 0
    setting = build_setting(run, tp_rank, cp_rank, mask=mask, is_calibrated=is_calibrated)
    return derive_model(run.model, setting, block=block, label_smoothing=is_smoothed)


def derive_step_collectives(
    run: RunConfig, contract: ModelContract, pp_rank: int = 0, *, micro_batches: Sequence[ModelContract] = ()
) -> tuple[Collective, ...]:
    """What the rank issues in one step of `run`, in order; of a pipeline the one on pp rank `pp_rank`.

    `micro_batches` say what it does for each of them, where that differs, as their documents may.
    """
    contracts = micro_batches or (contract,) * run.train.gradient_accumulation
    before: tuple[Collective, ...] = ()
    reduced: tuple[Collective, ...] = ()
    if run.parallel.dp_shard > 1 and run.parallel.pp == 1:
        issued = derive_shared_collectives(run, contracts)
    else:
        issued = derive_stage_collectives(run, contracts, pp_rank)
    if run.parallel.dp_shard > 1 and run.parallel.pp > 1:
        before, reduced = derive_step_gathers(run, contract, pp_rank), derive_step_reduces(run, contract, pp_rank)
    return (*before, *issued, *derive_totals(run), *reduced, *_derive_sums(run, contract, pp_rank))


def derive_closing_collectives(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> tuple[Collective, ...]:
    """What the rank issues once a step: totals, gradients over dp and cp, the gradient norm, largest magnitudes.

    The first and the last rank of a pipeline also sum the gradient of a table that both have. What dp_shard shares out
    is not in it: see `contract.axis.fsdp.count_moves`.
    """
    return (*derive_totals(run), *_derive_sums(run, contract, pp_rank))


def _derive_sums(run: RunConfig, contract: ModelContract, pp_rank: int) -> tuple[Collective, ...]:
    (axis, dp), dtype = find_sums(run), contract.setting.sum_dtype
    parts = select_run_parts(run, pp_rank)
    # What is shared out has its gradients reduced unit by unit.
    is_left = dp > 1 and run.parallel.dp_shard == 1
    over_dp = (Collective(REDUCE, axis, dp, (count_parameters(contract, parts),), dtype),) if is_left else ()
    return (
        *over_dp,
        *_derive_tied_sum(run, contract, pp_rank),
        *derive_replica_copies(run, contract, parts),
        *derive_grad_norm_collectives(run, contract.setting),
        *derive_history_collectives(run, pp_rank),
    )


def derive_grad_norm_collectives(run: RunConfig, setting: Setting) -> tuple[Collective, ...]:
    """Those of the gradient norm: the sum of squares of what each rank counts, over tp, dp_shard and pp."""
    shape = run.parallel.mesh_shape
    shared_out = [(shape.name("dp_shard_cp"), shape.degree("dp_shard_cp"))] if shape.dp_shard > 1 else []
    axes = (("tp", setting.tp), *shared_out, ("pp", shape.pp))
    return tuple(
        Collective(REDUCE, axis, degree, (1,), setting.statistics_dtype) for axis, degree in axes if degree > 1
    )


def _derive_tied_sum(run: RunConfig, contract: ModelContract, pp_rank: int) -> tuple[Collective, ...]:
    """The gradient of a table that is embedding on the first stage and head on the last."""
    if not run.model.tied_embeddings or run.parallel.pp == 1 or pp_rank not in (0, run.parallel.pp - 1):
        return ()
    (table,) = contract.entry[0].parameters
    rank, mesh = contract.setting.rank, run.parallel.mesh_shape
    shape = table.layout.local_shape(rank)
    if mesh.dp_shard > 1:
        shape = (count_share(table.ownership, rank, mesh.degree("dp_shard_cp")),)
    return (Collective(REDUCE, ENDS, 2, shape, contract.setting.sum_dtype),)


def derive_history_collectives(run: RunConfig, pp_rank: int = 0) -> tuple[Collective, ...]:
    """The largest magnitudes of a step, which delayed scales will look back at: one over tp, one over dp and cp."""
    recipe = run.quantization.resolved
    if recipe is None or not recipe.is_delayed:
        return ()
    recipes = derive_recipes(run.model, run.quantization)
    own = select_modules(recipes, select_run_parts(run, pp_rank))
    number = len(list_histories({module: recipes[module] for module in own}))
    if not number:
        return ()
    return tuple(
        Collective(REDUCE, axis, degree, (number,), "float32", op="max")
        for axis, degree in (("tp", run.parallel.tp), find_sums(run))
        if degree > 1
    )
