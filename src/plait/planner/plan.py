"""Plan a run: all plans that the devices allow, ranked; which are refused, and why; how far tensor parallelism pays."""

from dataclasses import dataclass

from plait.config.model import ModelConfig
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost
from plait.planner.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Refusal:
    """Plans that were considered and cannot be.

    Attributes:
        what: what they have in common, as `tp = 3` or `tp = 1, pp = 2`.
        reason: a sentence without a full stop: not divisible, or by how much it does not fit.
        num_plans: how many; 0 where they were refused by what they have in common, without being listed.
    """

    what: str
    reason: str
    num_plans: int = 0


@dataclass(frozen=True, slots=True)
class TensorDegree:
    """What a tensor degree costs.

    Attributes:
        layer: forward and backward of one block for the micro-batch of the best plan, in a group of `tp` devices: the
            same work on more and more devices.
        same: the best plan with this degree in place of its own; dp makes up for it. Whether it fits is in its verdict.
        best: the fastest plan with this degree that fits.
        reason: why something of these is missing; empty where nothing is.
    """

    tp: int
    layer: Cost | None
    same: Prediction | None
    best: Prediction | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Worse:
    """A tensor degree at which the complete predicted time is longer than at the degree before.

    Attributes:
        before: the degree before.
        term: what grew most: `compute`, `communication`, `bubble`, ...
        term_s: by how much.
    """

    tp: int
    before: int
    seconds: float
    before_s: float
    term: str
    term_s: float

    @property
    def factor(self) -> float:
        """How many times as long."""
        return self.seconds / self.before_s


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was found.

    Attributes:
        name: of the model, as it was asked for.
        ranked: the fastest plans that fit, the fastest first.
        nearest: where none fits, the plan that lacks least.
        num_considered: all plans of the space, those too that were left out because they cannot be among the fastest.
        degrees: every tensor degree that the model and the devices allow, from 1.
        worse_layer: the first degree at which the layer takes longer, on however many devices.
        worse_same: at which the step takes longer on these devices, the rest of the best plan as it is.
        worse_best: at which it takes longer although the rest is chosen anew.
        fixed: what was asked for, as `tp = 8`.
    """

    name: str
    model: ModelConfig
    cluster: Cluster
    seq_len: int
    global_batch: int
    ranked: tuple[Prediction, ...]
    nearest: Prediction | None
    refused: tuple[Refusal, ...]
    degrees: tuple[TensorDegree, ...]
    worse_layer: Worse | None
    worse_same: Worse | None
    worse_best: Worse | None
    num_considered: int
    fixed: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        """The fastest plan that fits, or else the one that lacks least."""
        if self.ranked:
            return self.ranked[0]
        assert self.nearest is not None, "a report has a plan"
        return self.nearest
