"""The last step of a token: logits of one row a request, gathered, and a token drawn from them."""

from plait.contract.linear import LinearParameters, derive_column_group
from plait.contract.model import ModelContract
from plait.contract.step import Move, list_moves
from plait.planner.hardware import Constant, Provenance
from plait.sharding import Invariant

LOGIT_BYTES = Constant(
    "inference.logit_bytes", 10.0, "B", Provenance.ASSUMED,
    "bfloat16 logits beside those in float32 and their probabilities", "2026-11-30", "medium", None, 6.0, 14.0,
)  # fmt: skip
"""Of each logit where a token is drawn, which every rank does of all the vocabulary."""


def derive_logits_gather(contract: ModelContract) -> tuple[Move, ...]:
    """What brings the logits of all ranks together: training never does, but who draws a token has to."""
    (table,) = contract.exit[-1].parameters
    head = derive_column_group(contract.setting, (LinearParameters("head", table),), target=Invariant())
    return tuple(move for move in list_moves(head.forward) if move.tensor == "y")
