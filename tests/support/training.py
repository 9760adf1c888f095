"""Small runs for tests of training."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from plait.config.axis.pipeline import PipelineConfig
from plait.config.data import DataConfig
from plait.config.model import GptConfig, ModelConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.presets import load_preset
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.train import loop
from plait.train.metrics import read_metrics

LLAMA = load_preset("llama-tiny").model_copy(update={"vocab_size": 67, "mlp_width": 92, "max_seq_len": 16})
"""Cuts unevenly over 2 and 3 ranks: 67 rows of vocabulary, 4 KV heads; 92 columns of the MLP over 3."""

GPT = GptConfig(num_layers=2, width=24, num_heads=4, vocab_size=67, max_seq_len=16, dropout=0.2, attention_dropout=0.1)
"""Biases, tied embeddings, and dropout, whose masks a resumed run must draw again."""

NANO_RUN = """
name = "nano"
[model]
preset = "llama-tiny"
vocab_size = 257
[precision]
compute = "float32"
[data]
kind = "tokens"
paths = ["tokens.npy"]
[train]
steps = 2
seq_len = 16
"""
"""As a file, beside which `save_tokens` has put its tokens."""


def save_tokens(folder: Path, *, num_tokens: int = 2001, vocab_size: int = 67, seed: int = 7) -> Path:
    """Tokens that can be learned: each is a function of the one before, but for some noise."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, vocab_size, num_tokens)
    tokens = np.where(rng.random(num_tokens) < 0.2, noise, np.cumsum(noise % 3) % vocab_size)
    path = folder / "tokens.npy"
    np.save(path, tokens.astype(np.uint16))
    return path


def build_run(
    folder: Path,
    *,
    model: ModelConfig = LLAMA,
    parallel: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    name: str = "run",
    **train: Any,
) -> RunConfig:
    """A run of a few steps of 4 sequences of 16 tokens, in float32 unless asked otherwise, in `folder`."""
    tokens = folder / "tokens.npy"
    settings: dict[str, Any] = {
        "steps": 6,
        "micro_batch_size": 4,
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "check_replicas_every": 2,
    }
    return RunConfig(
        name=name,
        seed=11,
        out_dir=str(folder / "runs"),
        model=model,
        parallel=ParallelConfig(**parallel or {}),
        precision=PrecisionConfig(**precision or {"compute": "float32"}),
        pipeline=PipelineConfig(**pipeline or {}),
        data=DataConfig(kind="tokens", paths=(str(tokens if tokens.exists() else save_tokens(folder)),)),
        train=TrainConfig(**settings | train),
    )


@contextmanager
def stop_during(step: int) -> Iterator[None]:
    """Send this process SIGTERM while step number `step`, counted from 1, is under way."""
    derive = loop.derive_learning_rate

    def interrupt(before: int, config: TrainConfig) -> float:
        if before == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return derive(before, config)

    with patch.object(loop, "derive_learning_rate", interrupt):
        yield


def read_losses(run: RunConfig) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step of a run, from its metrics."""
    records = read_metrics(Path(run.out_dir) / run.name / "metrics.jsonl")
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]
