"""How attention sees a whole sequence that is cut over context-parallel ranks, and what cannot be cut."""

from collections.abc import Iterator
from typing import Literal

from plait.config.data import DataConfig
from plait.config.hf.checkpoint import CheckpointModel
from plait.config.model import GptConfig, LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.quantization import QuantizationConfig
from plait.config.section import Problem, Section
from plait.config.train import TrainConfig
from plait.sharding import QueryHeads

ContextMethodName = Literal["ring", "all_gather", "all_to_all"]
OrderName = Literal["zigzag", "contiguous"]


class ContextConfig(Section):
    """What brings queries and keys of different ranks together, and which tokens a rank has; for `parallel.cp` > 1."""

    method: ContextMethodName = "ring"
    """Keys and values pass from rank to rank, are all gathered, or tokens are exchanged for heads (Ulysses)."""
    order: OrderName = "zigzag"
    """An early and a late part of each sequence on every rank, which is equal work, or one part after the other."""


def list_context_conflicts(
    model: LlamaConfig | GptConfig | CheckpointModel,
    parallel: ParallelConfig,
    context: ContextConfig,
    train: TrainConfig,
    quantization: QuantizationConfig,
) -> Iterator[Problem]:
    """Every rank must hold a token of each sequence, and attention must be of a kind that can be cut."""
    cp = parallel.cp
    if cp == 1:
        return
    seq_len = train.seq_len or model.max_seq_len
    if seq_len < cp:
        text = f"sequences of {seq_len} tokens cannot be cut over {cp} ranks: a rank would have none"
        yield Problem("parallel.cp", text, f"use a degree of at most {seq_len}, or longer sequences")
    if isinstance(model, GptConfig) and model.attention_dropout:
        text = "dropout of attention probabilities is not defined where no rank ever has them all"
        yield Problem("model.attention_dropout", f"{text} (parallel.cp = {cp})", "set it to 0; model.dropout may stay")
    fewest = find_fewest_heads(model, parallel.tp)
    if context.method == "all_to_all" and fewest is not None and fewest < cp:
        yield Problem(
            "context.method",
            f"deals query heads to {cp} context-parallel ranks, but a tp rank has only {fewest} of {model.num_heads}",
            f"use ring or all_gather, which cut no heads, or parallel.cp of at most {fewest}",
        )
    if quantization.resolved is not None:
        text = f"scales would be those of other tokens than on one rank (parallel.cp = {cp}), so its results, too"
        yield Problem("quantization.recipe", text, "leave one of them out")
    yield from _list_compile_conflicts(train, f"parallel.cp = {cp}")


def list_document_conflicts(data: DataConfig | None, train: TrainConfig) -> Iterator[Problem]:
    """Attention within documents is computed tile by tile."""
    if data is None or not data.mask_documents:
        return
    yield from _list_compile_conflicts(train, "data.mask_documents = true")


def _list_compile_conflicts(train: TrainConfig, asked: str) -> Iterator[Problem]:
    if train.compile:
        text = f"attention that takes its keys block by block is not compiled ({asked})"
        yield Problem("train.compile", text, "leave one of them out")


def find_fewest_heads(model: LlamaConfig | GptConfig | CheckpointModel, tp: int) -> int | None:
    """Query heads of the tp rank that has fewest; None where they cannot be cut, which is said elsewhere."""
    if tp > model.num_heads:
        return None
    heads = QueryHeads(model.num_heads, model.num_kv_heads, model.head_width)
    split = heads.build_split(model.num_heads * model.head_width, tp)
    return min(split.lengths) // model.head_width
