"""One optimizer step: accumulate, reduce over dp and cp, normalise, clip, update."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.mesh import Mesh
from plait.config.run import FineTuneConfig, RunConfig
from plait.errors import PlaitError
from plait.hf.stored import Stored
from plait.parallel.apply import enter_sequences
from plait.parallel.context.tokens import take_own
from plait.parallel.dropout import TokenOffset
from plait.parallel.grad_norm import GradNorm
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.parallel.precision.model import HistoryUpdate
from plait.sharding import build_split
from plait.train.corpus.windows import IGNORE_INDEX, MicroBatch
from plait.train.optimizer import AdamW, Gradients
from plait.train.replicas import ReplicaGradients

ComputeLogits = Callable[[nn.Module, Tensor], Tensor]
"""Model and tokens `[B, S]` -> this rank's columns of the logits, `[T, V/tp]`."""


def compute_native_logits(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Call a model of our own."""
    logits_TV: Tensor = model(tokens_BS)
    return logits_TV


def compute_hf_logits(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Call a causal language model of transformers: whole sequences, nothing padded, nothing kept for generation."""
    logits_BSV: Tensor = model(input_ids=tokens_BS, use_cache=False).logits
    return logits_BSV.flatten(0, 1)


class StepResult(NamedTuple):
    """What one step did; the same on every rank."""

    loss: float
    """Mean over all target tokens of all micro-batches and dp ranks."""
    grad_norm: float
    num_targets: int
    """Of all micro-batches and dp ranks."""
    is_stop_requested: bool
    """Whether any rank was asked to stop."""


@dataclass
class Trainer:
    """A model with its gradients and optimizer on one rank of a mesh."""

    run: RunConfig | FineTuneConfig
    mesh: Mesh
    model: nn.Module
    gradients: Gradients
    optimizer: AdamW
    compute_logits: ComputeLogits
    replicas: ReplicaGradients
    parts: Mapping[str, Sequence[tuple[str, Stored]]] = field(default_factory=dict)
    """By FQN, under which names, and as which parts, checkpoints hold a parameter, where that is not as it is."""
    hf_config: Mapping[str, Any] | None = None
    """The `config.json` of the directory that is trained further, as it was at the start."""
    offset: TokenOffset = field(init=False)
    histories: HistoryUpdate = field(init=False)
    """What reads where in the run tokens are, and what is updated after a step: found once."""
    grad_norm: GradNorm = field(init=False)
    """Which gradients this rank counts, found once too."""

    def __post_init__(self) -> None:
        self.offset, self.histories = TokenOffset(self.model), HistoryUpdate(self.model)
        self.grad_norm = GradNorm(self.model)

    def step(self, micro_batches: Iterable[MicroBatch], learning_rate: float, *, stop: bool = False) -> StepResult:
        """Do one step.

        The loss is summed, not averaged, in each micro-batch; the gradients are divided once by the number of target
        tokens of the whole step. So every token weighs the same however the tokens are spread over micro-batches and
        ranks.

        Raises:
            PlaitError: on every rank, if loss or gradient are not finite; the parameters are as they were.
        """
        if not self.model.training:
            self.model.train()
        self.gradients.zero()
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        totals[:2] = self._compute_gradients(micro_batches)
        totals[2] += stop
        loss_sum, num_targets, stops = self._sum_over_ranks(totals).tolist()
        self.gradients.all_reduce(self.mesh.dp_cp)
        self._sum_repeated_gradients()
        self.replicas.copy_first()
        self.gradients.scale(1 / max(1.0, num_targets))
        norm = float(self.grad_norm.clip_(self.run.train.max_grad_norm or math.inf))
        result = StepResult(loss_sum / max(1.0, num_targets), norm, int(num_targets), stops > 0)
        _check_finite(result)
        self.optimizer.step(learning_rate)
        self.histories.run()
        return result

    def _compute_gradients(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Add the gradients of all micro-batches up; return their loss and number of targets, float64 `[2]`."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        batches = list(micro_batches)
        for index, batch in enumerate(batches):
            self.gradients.expect(is_last=index + 1 == len(batches))
            tokens, targets = self._enter(batch)
            self.offset.set(batch.first_token)
            logits = self.compute_logits(self.model, tokens)
            loss = self._compute_loss(logits, targets)
            loss.backward()
            totals += torch.stack((loss.detach().double(), count_targets(targets)))
        return totals

    def _enter(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Begin a micro-batch: this rank's tokens `[B, S/cp]` of it, and their targets `[T]`."""
        sequences = enter_sequences(self.model, self.run.seq_len, batch.documents)
        own = (
            take_own(x, sequences.order, sequences.rank).to(self.mesh.device, non_blocking=True)
            for x in (batch.tokens, batch.targets.view_as(batch.tokens))
        )
        tokens, targets = own
        return tokens, targets.flatten()

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets of a micro-batch."""
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.mesh,
            vocab_size=self.run.model.vocab_size,
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.run.train.label_smoothing,
            z_loss=self.run.train.z_loss,
            reduction="sum",
        )

    def _sum_repeated_gradients(self) -> None:
        """Nothing: every rank of a tp group has parameters of its own, and summed the gradients of others in layers."""

    def _sum_over_ranks(self, totals: Tensor) -> Tensor:
        """Sum over dp and cp, and over pp, of which the last stage alone has any, in float64 whatever gradients are in.

        Of tp take the most: only the stop may differ.
        """
        axis = self.mesh.dp_cp
        rows = collectives.all_gather(totals[None], axis, build_split(axis.degree, axis.degree), label="totals")
        total = collectives.all_reduce(rows.sum(0), self.mesh.pp, dtype=rows.dtype, label="totals")
        return collectives.all_reduce(total, self.mesh.tp, op="max", label="totals")


def count_targets(targets: Tensor) -> Tensor:
    """How many of them count, in float64."""
    return (targets != IGNORE_INDEX).sum().double()


def _check_finite(result: StepResult) -> None:
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise PlaitError(
            f"training diverged: loss {result.loss}, gradient norm {result.grad_norm}; the parameters were not updated",
            hint="resume from the last checkpoint with a lower train.learning_rate, or a longer train.warmup_steps",
        )
