"""How long and how a model is trained."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from plait.config.section import Count, Every, Probability, Seconds, Section

Recompute = Literal["none", "selective", "full"]
"""What is computed again in backward: nothing, the attention core, or every block from its input."""


class TrainConfig(Section):
    """Batch, optimizer, schedule and what is written when."""

    steps: Count = 1000
    seq_len: Count | None = None
    """Tokens of one sequence; the model's `max_seq_len` unless given."""
    micro_batch_size: Count = 1
    """Sequences of one dp rank in one forward and backward."""
    gradient_accumulation: Count = 1
    """Micro-batches whose gradients are added up before a step."""

    recompute: Recompute = "none"
    """What backward computes again instead of keeping it: nothing, the core of attention, or every block."""
    compile: bool = False
    """Whether torch.compile makes every block one graph; the first step of each batch shape takes longer."""

    learning_rate: PositiveFloat = 3e-4
    """After warm-up; from there a cosine falls to `min_learning_rate_ratio` of it at the last step."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NonNegativeFloat = 0.1
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    eps: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0 means measured, not clipped."""
    label_smoothing: Probability = 0.0
    z_loss: NonNegativeFloat = 0.0
    """Weight of the square of the log of the softmax denominator in the loss."""

    checkpoint_every: Every = 0
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Every = 3
    """Newest checkpoints that are kept; 0 keeps all."""
    async_checkpoint: bool = False
    """Whether checkpoints are written while training goes on, from a copy of what they hold in memory of the CPU."""
    resume: Literal["auto", "must", "never", "last_good"] = "auto"
    """Go on from the run's newest checkpoint: if there is one, always, or never (and then there must be none); or from
    the newest that is undamaged, saying which are not."""
    check_replicas_every: Every = 100
    """Steps between checks that replicated parameters are the same on all ranks."""
    log_every: Count = 1
    tensorboard: bool = False
    timeout_s: Seconds = 300.0
    """How long a collective waits for absent ranks."""
    start_timeout_s: Seconds = 300.0
    """How long ranks have to start and to find each other."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often ranks that `plait train` starts itself are started again, from the newest checkpoint, when one of them
    dies, hangs or crashes; torchrun has `--max-restarts` for its own."""
    check_pace_every: Every = 10
    """Steps over which it is measured how long each rank is busy and how long it waits, to name one that is slow."""
