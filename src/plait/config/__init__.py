"""Frozen configs of models and runs, presets, TOML and `key=value` overrides, without torch."""

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
    "DataConfig",
    "FineTuneConfig",
    "GptConfig",
    "Llama3RopeScaling",
    "LlamaConfig",
    "ModelConfig",
    "OverlapConfig",
    "ParallelConfig",
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
