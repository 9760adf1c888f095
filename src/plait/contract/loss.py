"""Cross-entropy over a vocabulary that is cut over tp: the logits are never whole."""

from plait.contract.collective import Collective, ReduceOp
from plait.contract.op import Op, Saved
from plait.contract.setting import Setting, Tensor
from plait.contract.step import Move
from plait.dtype import DType
from plait.sharding import Invariant, Layout, Partial, Shard, Split, derive_transition

_REDUCE = derive_transition(Partial(), Invariant()).forward


def derive_cross_entropy(setting: Setting, cut: Split, *, label_smoothing: bool = False) -> Op:
    """Cross-entropy of logits `[T, V/tp]`: one all-reduce for the row maxima, one for all row sums, none in backward.

    The sums are those of the exponentials and the target's logit, with label smoothing also that of all logits.
    Softmax is computed again in backward, so beside the logits only the log-sum-exp of each row is kept.
    """
    T = setting.num_tokens
    dtype: DType = "float64" if setting.dtype == "float64" else "float32"
    sums = 3 if label_smoothing else 2
    logits = setting.build_tensor("logits", "V", cut.size, Shard(1), cut)

    def reduce(name: str, op: ReduceOp, dims: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Move, ...]:
        collective = Collective(_REDUCE, "tp", setting.tp, shape, dtype, op=op)
        return (Move(name, dims, collective),) if setting.tp > 1 else ()

    return Op(
        name="loss",
        inputs=(logits,),
        outputs=(Tensor("loss", Layout((), (), Invariant())),),
        forward=(*reduce("max", "max", ("T",), (T,)), *reduce("sums", "sum", (str(sums), "T"), (sums, T))),
        saved=(
            Saved("logits", logits.layout.local_shape(setting.rank), setting.dtype),
            Saved("lse", (T,), dtype),
            Saved("targets", (T,), "int64"),
        ),
    )
