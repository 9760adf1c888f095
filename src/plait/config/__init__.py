"""Frozen configs of models and runs, presets, TOML and `key=value` overrides, without torch.

Every name is looked up on first use: recipes and what is not a section do without pydantic, whose import takes longer
than explaining a linear.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.config.axis.context import ContextConfig
    from plait.config.axis.pipeline import PipelineConfig
    from plait.config.data import DataConfig
    from plait.config.hf.checkpoint import CheckpointModel
    from plait.config.load import load_run_config, load_training_config
    from plait.config.model import GptConfig, Llama3RopeScaling, LlamaConfig, ModelConfig
    from plait.config.overlap import OverlapConfig
    from plait.config.parallel import ParallelConfig
    from plait.config.precision import PrecisionConfig
    from plait.config.presets import Preset, list_presets, load_preset
    from plait.config.quantization import QuantizationConfig
    from plait.config.run import FineTuneConfig, RunConfig
    from plait.config.train import TrainConfig

__all__ = [
    "CheckpointModel",
    "ContextConfig",
    "DataConfig",
    "FineTuneConfig",
    "GptConfig",
    "Llama3RopeScaling",
    "LlamaConfig",
    "ModelConfig",
    "OverlapConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "Preset",
    "QuantizationConfig",
    "RunConfig",
    "TrainConfig",
    "list_presets",
    "load_preset",
    "load_run_config",
    "load_training_config",
]

_MODULES = {
    "CheckpointModel": "hf.checkpoint",
    "ContextConfig": "axis.context",
    "DataConfig": "data",
    "FineTuneConfig": "run",
    "GptConfig": "model",
    "Llama3RopeScaling": "model",
    "LlamaConfig": "model",
    "ModelConfig": "model",
    "OverlapConfig": "overlap",
    "ParallelConfig": "parallel",
    "PipelineConfig": "axis.pipeline",
    "PrecisionConfig": "precision",
    "Preset": "presets",
    "QuantizationConfig": "quantization",
    "RunConfig": "run",
    "TrainConfig": "train",
    "list_presets": "presets",
    "load_preset": "presets",
    "load_run_config": "load",
    "load_training_config": "load",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"plait.config.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
