"""A whole run: model, mesh, precision, data and training, and what they must satisfy together."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from plait.config.axis.context import ContextConfig
from plait.config.axis.pipeline import PipelineConfig
from plait.config.conflicts import list_conflicts
from plait.config.data import DataConfig
from plait.config.hf.checkpoint import CheckpointModel
from plait.config.model import ModelConfig
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.quantization import QuantizationConfig
from plait.config.section import Problem, Section
from plait.config.train import TrainConfig


class AnyRun(Section):
    """Everything that decides what a run computes, whatever its model is."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    """Key of initialisation, dropout and data order."""
    out_dir: str = "runs"
    """Folder of all runs; this one writes to `out_dir/name`."""
    model: Any
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    overlap: OverlapConfig = OverlapConfig()
    precision: PrecisionConfig = PrecisionConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    data: DataConfig | None = None
    train: TrainConfig = TrainConfig()

    @property
    def seq_len(self) -> int:
        """Tokens of one training sequence."""
        seq_len: int = self.train.seq_len or self.model.max_seq_len
        return seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        """T: tokens of one dp rank in one forward and backward."""
        return self.train.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all dp ranks and micro-batches of one optimizer step."""
        return self.tokens_per_micro_batch * self.train.gradient_accumulation * self.parallel.dp

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays within the documents of a sequence."""
        return self.data is not None and self.data.mask_documents

    def conflicts(self) -> Iterator[Problem]:
        """Everything that concerns more than one section."""
        yield from list_conflicts(dict(self))


class RunConfig(AnyRun):
    """A run of a model of our own, trained from the start."""

    model: ModelConfig


class FineTuneConfig(AnyRun):
    """A run that trains a Hugging Face directory further."""

    model: CheckpointModel
