"""Collectives whose gradient goes the derived way back, in eager mode and under torch.compile."""

from plait.comm.autograd.redistribute import redistribute

__all__ = ["redistribute"]
