"""The step of a run whose layers are cut into pipeline stages: micro-batches go through them by torch's schedules."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.mesh import Mesh
from plait.config.run import RunConfig
from plait.contract.context.sequences import Sequences
from plait.contract.pipeline.step import build_pipeline, select_run_parts
from plait.contract.pipeline.stream import derive_stream_shape
from plait.contract.training import build_setting
from plait.models.stage import Stage
from plait.parallel.apply import Tied, record_of, tie, tied_in
from plait.parallel.fsdp.local import count_share, local_of
from plait.parallel.pipeline.schedule import TorchSchedule, build_schedule, explain_failure
from plait.parallel.pipeline.stage import RunningStage, Stream
from plait.train.corpus.windows import MicroBatch
from plait.train.step import Trainer, count_targets

TIED = frozenset({"embedding.weight"})
"""What is embedding and head, where these are tied: the first stage and the last have it."""


def tie_ends(model: nn.Module, run: RunConfig, mesh: Mesh) -> None:
    """Let the first and the last rank of a pipeline know what both have. Every rank of the world has to call it."""
    if run.model.tied_embeddings:
        tie(model, Tied(TIED, mesh.build_ends()))


@dataclass
class PipelineTrainer(Trainer):
    """A trainer of the stages of one pp rank; all micro-batches of a step are under way at once."""

    stages: Sequence[RunningStage] = ()
    schedule: TorchSchedule = field(init=False)
    batches: Sequence[MicroBatch] = ()
    """Those of the step under way."""
    sequences: list[Sequences | None] = field(default_factory=list)
    """Of each of them, as its passes go by them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.run, RunConfig)
        run, parts = self.run, select_run_parts(self.run, self.mesh.pp.rank)
        pipeline, stream = build_pipeline(run), build_stream(run, self.mesh)
        self.stages = [
            RunningStage(
                Stage(self.model, part),  # type: ignore[arg-type]
                part,
                pipeline.num_stages,
                self.mesh,
                stream,
                self._go_on_with,
                self._run_last if part.is_last else run_stage,
            )
            for part in parts
        ]
        self.schedule = build_schedule(pipeline, self.stages, self._compute_loss)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads tokens."""
        return self.stages[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank has the loss."""
        return self.stages[-1].is_last

    def _compute_gradients(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """As of all layers; loss and targets are those of the last stage, and zero on ranks that have not got it."""
        self.batches, device = list(micro_batches), self.mesh.device
        own: list[tuple[Tensor, Tensor]] = []
        self.sequences = []
        for batch in self.batches:
            own.append(self._enter(batch))
            self.sequences.append(self.mesh.sequences)
        tokens = [torch.cat([tokens for tokens, _ in own])] if self.is_first else []
        targets = torch.cat([targets for _, targets in own]) if self.is_last else None
        losses: list[Tensor] = []
        try:
            self.schedule.step(*tokens, target=targets, losses=losses, return_outputs=False)
        except RuntimeError as error:
            raise explain_failure(error) from None
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for loss in losses:
            totals[0] += loss.detach().double()
        if targets is not None:
            totals[1] = count_targets(targets)
        return totals

    def _go_on_with(self, index: int) -> None:
        """A pass of a micro-batch begins or goes on: its masks and its documents are those of the model now."""
        self.offset.set(self.batches[index].first_token)
        self.mesh.sequences = self.sequences[index]

    def _sum_repeated_gradients(self) -> None:
        """That of a table which is embedding here and head there: each of the two has what it is used for.

        One of which FSDP has cut the rows moves as many elements from every rank, as everything does that it has cut.
        """
        tied, record = tied_in(self.model), record_of(self.model)
        for name in () if tied is None else tied.names:
            gradient = self.model.get_parameter(name).grad
            assert gradient is not None, name
            assert tied is not None, name
            assert record is not None, name
            own = local_of(gradient)
            moved = own if record.sharded_over is None else own.new_zeros(count_share(gradient, record.sharded_over))
            moved.view(-1)[: own.numel()] = own.flatten()
            total = collectives.all_reduce(moved, tied.axis, label="tied")
            own.copy_(total.view(-1)[: own.numel()].view(own.shape))

    def _run_last(self, stage: nn.Module, x: Tensor, size_BS: tuple[int, int]) -> Tensor:
        return self.compute_logits(_Sized(stage, size_BS), x)


class _Sized(nn.Module):
    """A stage that is called with one argument, as a model is."""

    def __init__(self, stage: nn.Module, size_BS: tuple[int, int]) -> None:
        super().__init__()
        self._stage = (stage,)
        self._size_BS = size_BS

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage."""
        logits: Tensor = self._stage[0](x, self._size_BS)
        return logits


def run_stage(stage: nn.Module, x: Tensor, size_BS: tuple[int, int]) -> Tensor:
    """Run a stage that is not the last."""
    y: Tensor = stage(x, size_BS)
    return y


def build_stream(run: RunConfig, mesh: Mesh) -> Stream:
    """What travels between the stages of a run, at the place of this rank on tp and cp."""
    setting = build_setting(run, mesh.tp.rank, mesh.cp.rank)
    batch = run.train.micro_batch_size
    return Stream(
        (batch, setting.num_tokens // batch),
        derive_stream_shape(setting, run.model.width),
        getattr(torch, run.precision.compute),
        is_sharded=run.parallel.sequence_parallel and mesh.tp.degree > 1,
    )
