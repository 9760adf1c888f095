"""A whole run: model, mesh, precision, data and training, and what they must satisfy together."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from plait.config.data import DataConfig
from plait.config.hf.checkpoint import CheckpointModel
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.section import Problem, Section
from plait.config.train import TrainConfig
from plait.errors import ShardingError
from plait.sharding import Columns, Cut, QueryHeads

AnyModel = LlamaConfig | GptConfig | CheckpointModel


class AnyRun(Section):
    """Everything that decides what a run computes, whatever its model is."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    """Key of initialisation, dropout and data order."""
    out_dir: str = "runs"
    """Folder of all runs; this one writes to `out_dir/name`."""
    model: Any
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    precision: PrecisionConfig = PrecisionConfig()
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

    def conflicts(self) -> Iterator[Problem]:
        """Everything that concerns more than one section."""
        yield from list_conflicts(dict(self))


class RunConfig(AnyRun):
    """A run of a model of our own, trained from the start."""

    model: ModelConfig


class FineTuneConfig(AnyRun):
    """A run that trains a Hugging Face directory further."""

    model: CheckpointModel


def list_conflicts(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems between the sections that are there, so that those of valid ones show beside an invalid one."""
    for names, rule in _RULES.items():
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _list_degree_conflicts(model: AnyModel, parallel: ParallelConfig) -> Iterator[Problem]:
    """Every rank must hold a part of every layer."""
    heads = QueryHeads(model.num_heads, model.num_kv_heads, model.head_width)
    query = model.num_heads * model.head_width
    cuts: dict[str, tuple[int, Cut]] = {"layers.*.attention.wq [N*H, D]": (query, heads)}
    if model.mlp_width is not None:
        cuts["layers.*.mlp.w_up [F, D]"] = (model.mlp_width, Columns())
    cuts["embedding and head [V, D]"] = (model.vocab_size, Columns())
    most = min(model.num_heads, model.mlp_width or model.num_heads, model.vocab_size)
    for what, (size, cut) in cuts.items():
        try:
            cut.build_split(size, parallel.tp)
        except ShardingError as error:
            yield Problem("parallel.tp", f"{what}: {error.message}", f"use a degree of at most {most}")


def _list_schedule_conflicts(train: TrainConfig) -> Iterator[Problem]:
    """The warm-up must be over by the last step."""
    if train.warmup_steps > train.steps:
        yield Problem("train.warmup_steps", f"is more than train.steps = {train.steps}")


def _list_length_conflicts(model: AnyModel, train: TrainConfig) -> Iterator[Problem]:
    """Positions beyond the model's are not defined."""
    if train.seq_len is not None and train.seq_len > model.max_seq_len:
        yield Problem("train.seq_len", f"is more than model.max_seq_len = {model.max_seq_len}")


def _list_token_conflicts(model: AnyModel, parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Under sequence parallelism every rank must hold a token."""
    tokens = train.micro_batch_size * (train.seq_len or model.max_seq_len)
    if parallel.sequence_parallel and tokens < parallel.tp:
        yield Problem(
            "parallel.tp",
            f"{tokens} tokens of a micro-batch cannot be sharded over {parallel.tp} ranks: a rank would have none",
            "set parallel.sequence_parallel = false, or give a micro-batch more tokens",
        )


def _list_chunk_conflicts(
    model: AnyModel, parallel: ParallelConfig, overlap: OverlapConfig, train: TrainConfig
) -> Iterator[Problem]:
    """A piece has at least one token."""
    tokens = train.micro_batch_size * (train.seq_len or model.max_seq_len)
    fewest = tokens // parallel.tp
    if parallel.tp == 1 or overlap.policy == "disabled" or overlap.chunks == "auto" or not fewest:
        return
    if overlap.chunks > fewest:
        yield Problem(
            "overlap.chunks",
            f"a rank has {fewest} of the {tokens} tokens of a micro-batch (parallel.tp = {parallel.tp}), "
            f"which cannot be cut into {overlap.chunks} pieces",
            f'use at most {fewest}, or "auto"',
        )


_RULES: dict[tuple[str, ...], Callable[..., Iterator[Problem]]] = {
    ("train",): _list_schedule_conflicts,
    ("model", "parallel"): _list_degree_conflicts,
    ("model", "train"): _list_length_conflicts,
    ("model", "parallel", "train"): _list_token_conflicts,
    ("model", "parallel", "overlap", "train"): _list_chunk_conflicts,
}
