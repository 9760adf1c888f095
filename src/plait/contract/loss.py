"""Losses over a vocabulary that is cut over tp: a few numbers of each row are exchanged, the logits never."""

from plait.contract.collective import Collective, ReduceOp
from plait.contract.op import Op, Saved
from plait.contract.setting import Setting, Tensor
from plait.contract.step import REDUCE, Move
from plait.sharding import Invariant, Layout, Shard, Split


def derive_cross_entropy(setting: Setting, cut: Split, *, label_smoothing: bool = False) -> Op:
    """Cross-entropy of logits `[T, V/tp]`: the row maxima are reduced, then all row sums in one; nothing in backward.

    The sums are those of the exponentials and the target's logit, with label smoothing also that of all logits.
    Softmax is computed again in backward, so beside the logits only a few numbers of each row are kept.
    """
    T = setting.num_tokens
    return Op(
        name="loss",
        inputs=(_build_logits(setting, cut), Tensor("targets", Layout(("T",), (T,), Invariant()))),
        outputs=(Tensor("loss", Layout((), (), Invariant())),),
        forward=_derive_row_moves(setting, 3 if label_smoothing else 2),
        saved=(*_list_saved(setting, cut), Saved("targets", (T,), "int64"), Saved("masks", (2, T), "bool")),
    )


def derive_log_prob(setting: Setting, cut: Split) -> Op:
    """Log-probability of each target: the negative cross-entropy of each row."""
    log_prob = Tensor("log_prob", Layout(("T",), (setting.num_tokens,), Invariant()))
    loss = derive_cross_entropy(setting, cut)
    return Op("log_prob", loss.inputs, (log_prob,), forward=loss.forward, saved=loss.saved)


def derive_entropy(setting: Setting, cut: Split) -> Op:
    """Entropy of each row's distribution; the sums are those of the exponentials and of their entropies."""
    T = setting.num_tokens
    return Op(
        name="entropy",
        inputs=(_build_logits(setting, cut),),
        outputs=(Tensor("entropy", Layout(("T",), (T,), Invariant())),),
        forward=_derive_row_moves(setting, 2),
        saved=(*_list_saved(setting, cut), Saved("entropy", (T,), setting.statistics_dtype)),
    )


def _build_logits(setting: Setting, cut: Split) -> Tensor:
    return setting.build_tensor("logits", "V", cut.size, Shard(1), cut)


def _list_saved(setting: Setting, cut: Split) -> tuple[Saved, ...]:
    logits = _build_logits(setting, cut).layout.local_shape(setting.rank)
    return (Saved("logits", logits, setting.dtype), Saved("lse", (setting.num_tokens,), setting.statistics_dtype))


def _derive_row_moves(setting: Setting, num_sums: int) -> tuple[Move, ...]:
    T = setting.num_tokens
    rows: tuple[tuple[str, ReduceOp, tuple[str, ...], tuple[int, ...]], ...] = (
        ("max", "max", ("T",), (T,)),
        ("sums", "sum", (str(num_sums), "T"), (num_sums, T)),
    )
    return tuple(
        Move(name, dims, Collective(REDUCE, "tp", setting.tp, shape, setting.statistics_dtype, op=op))
        for name, op, dims, shape in rows
        if setting.tp > 1
    )
