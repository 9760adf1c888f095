"""What reading a model's rules finds of one module, and how rules and modules are named."""

import re
from dataclasses import dataclass

from torch import nn

from plait.contract.plan import Role

GROUP = "input"
"""The one gather group of a region."""

COLUMN_RULES = ("colwise", "colwise_gather_output", "colwise_rep")
ROW_RULES = ("rowwise", "rowwise_split_input", "rowwise_rep")
WHOLE_RULES = ("replicated_with_grad_allreduce", "replicate")


@dataclass(frozen=True)
class Finding:
    """What one module is, and why.

    Attributes:
        whole: why every rank holds all of it, where one does.
    """

    role: Role
    why: str
    whole: str | None = None


def generic(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises along its last dim."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm")
