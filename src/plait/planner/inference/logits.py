"""The last step of a token: logits of one row a request, gathered, and a token drawn from them."""

from plait.contract.linear import LinearParameters, derive_column_group
from plait.contract.model import ModelContract
from plait.contract.step import Move, list_moves
from plait.sharding import Invariant


def derive_logits_gather(contract: ModelContract) -> tuple[Move, ...]:
    """What brings the logits of all ranks together: training never does, but who draws a token has to."""
    (table,) = contract.exit[-1].parameters
    head = derive_column_group(contract.setting, (LinearParameters("head", table),), target=Invariant())
    return tuple(move for move in list_moves(head.forward) if move.tensor == "y")
