"""From a model config to its module."""

import torch

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.models.gpt import GptModel
from plait.models.llama import LlamaModel


def build_model(
    config: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaModel | GptModel:
    """Build the unsharded model; its values are torch's defaults until `initialize` or a checkpoint sets them.

    A model too large for one device is built on the `meta` device, made parallel, given memory by `to_empty` and then
    initialized: that gives every rank the same numbers as cutting the initialized whole.
    """
    with torch.device(device):
        model = _build(config)
    return model.to(dtype)


def _build(config: ModelConfig) -> LlamaModel | GptModel:
    match config:
        case LlamaConfig():
            return LlamaModel(config)
        case GptConfig():
            return GptModel(config)
