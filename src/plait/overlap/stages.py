"""The receipt of a pipeline: each rank keeps that of its own stages, and a reader wants all layers."""

from collections.abc import Sequence

import torch

from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.overlap.receipt import Receipt


def gather_receipt(receipt: Receipt, axis: Axis, device: torch.device) -> Receipt:
    """The receipts of all ranks of `axis`, that of pipeline stages, as one; every rank has to call it.

    Raises:
        TransportError: a rank did not join.
    """
    if axis.degree == 1:
        return receipt
    for line in receipt.lines:
        line.read_stalls()
    return merge_receipts(share_over(receipt, axis, device))


def merge_receipts(receipts: Sequence[Receipt]) -> Receipt:
    """The lines of all, one receipt after the other.

    Without lines what is said by the one that says most: a stage that has nothing quantized knows of no kernel.
    """
    lines = [line for receipt in receipts for line in receipt.lines]
    notes = [receipt.note for receipt in receipts if receipt.note is not None]
    return Receipt(
        lines,
        next((receipt.asked for receipt in receipts if receipt.asked), ""),
        None if lines else max(notes, key=len, default=None),
        sum(receipt.num_dropped for receipt in receipts),
    )
