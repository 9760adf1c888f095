"""The blocks of a Hugging Face model."""

from torch import nn

from plait.hf.library import import_library


def list_blocks(model: nn.Module) -> list[nn.Module]:
    """Those that transformers marks as what may be computed again in backward."""
    marked = import_library("transformers.modeling_layers").GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, marked)]
