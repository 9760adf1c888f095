"""What each context rank has to do for attention in one layer, and what it sends for that."""

from dataclasses import dataclass

from plait.contract.block.context import derive_attention_size
from plait.contract.context.attention import build_plan
from plait.contract.context.balance import Balance, derive_balance
from plait.contract.context.traffic import derive_context_traffic
from plait.contract.model import ModelContract


@dataclass(frozen=True)
class ContextReport:
    """Of the attention of one layer and micro-batch, by rank on the context axis.

    Attributes:
        balance: score elements of the own heads.
        forward_bytes, backward_bytes: what each rank sends.
    """

    method: str
    balance: Balance
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]

    @property
    def sent_bytes(self) -> tuple[float, ...]:
        """Forward and backward."""
        return tuple(map(sum, zip(self.forward_bytes, self.backward_bytes, strict=True)))


def build_context_report(contract: ModelContract) -> ContextReport | None:
    """Count it for the tp rank of `contract`; None where no sequence is cut."""
    setting = contract.setting
    if setting.sequences is None:
        return None
    core = next(op for op in contract.block if op.is_attention)
    query, kv = (x.layout.local_shape(setting.rank)[1] for x in core.inputs[:2])
    size = derive_attention_size(setting, contract.config.head_width, (query, kv))
    plan = build_plan(setting.sequences.order, setting.sequences.mask, setting.batch)
    traffic = derive_context_traffic(plan, size, setting.context_method)
    heads = {"num_heads": size.num_heads, "num_kv_heads": size.num_kv_heads}
    ranks = range(plan.degree)
    return ContextReport(
        str(setting.context_method),
        derive_balance(plan, setting.context_method, **heads),
        tuple(map(traffic.forward.sent_bytes, ranks)),
        tuple(map(traffic.backward.sent_bytes, ranks)),
    )
