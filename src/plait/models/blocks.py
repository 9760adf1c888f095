"""What a run does to whole blocks of our models: compiles them, computes them again in backward."""

from torch import nn

from plait.comm.mesh import Mesh
from plait.config.train import TrainConfig
from plait.parallel.block.compile import compile_forward
from plait.parallel.block.recompute import apply_recompute


def prepare_blocks(model: nn.Module, train: TrainConfig, mesh: Mesh) -> None:
    """Let the blocks of `model`, parallel over `mesh`, run as `train` says; call it before they are sharded further."""
    for block in model.get_submodule("layers").children():
        if train.compile:
            compile_forward(block)
        if train.recompute == "full":
            apply_recompute(block, mesh, last="mlp.w_down")
        elif train.recompute == "selective":
            apply_recompute(block, mesh, what="attention.core")
