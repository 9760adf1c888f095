"""Every row beside its prediction, and every source beside the null model.

The null model of a kind knows one constant for all rows of a source, the best there is: the one whose largest error is
smallest, since that is what the planner has to beat.

    iteration_time, tokens_per_s_gpu   6 N D at one MFU
    layer_time                         2 N D forward, 4 N D backward (6 with full recompute), at one MFU
    mfu, *_tflops, *_speedup, *_busbw  one value
    *_memory                           one number of bytes for a parameter of a rank (activations: for an element)
    gemm_*, overlap_kernel_time        one share of the peak rate
    collective_time                    one share of the link's rate
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from plait.errors import PlaitError
from plait.planner.score.kernels import (
    answer_collective_busbw,
    answer_collective_time,
    answer_gemm_tflops,
    answer_gemm_time,
    answer_overlap_kernel_time,
    answer_speedup,
)
from plait.planner.score.memory import answer_activation_memory, answer_peak_memory, answer_static_memory
from plait.planner.score.row import NotCovered, Row
from plait.planner.score.steps import (
    Answer,
    answer_hw_tflops,
    answer_iteration_time,
    answer_layer_time,
    answer_mfu,
    answer_model_tflops,
    answer_tokens_per_s,
)

FIT_ROWS = ("kort_t4_*", "dgxc_v25.04_H100_llama*_bf16*")
"""Those that one constant per device, the derate of training, was fitted to; all others test it."""

_ANSWERS: dict[str, Callable[[Row], Answer]] = {
    "activation_memory": answer_activation_memory,
    "collective_busbw": answer_collective_busbw,
    "collective_time": answer_collective_time,
    "gemm_tflops": answer_gemm_tflops,
    "gemm_time": answer_gemm_time,
    "hw_tflops": answer_hw_tflops,
    "iteration_time": answer_iteration_time,
    "layer_time": answer_layer_time,
    "mfu": answer_mfu,
    "model_tflops": answer_model_tflops,
    "overlap_kernel_time": answer_overlap_kernel_time,
    "overlap_speedup": answer_speedup,
    "peak_memory": answer_peak_memory,
    "static_memory": answer_static_memory,
    "tokens_per_s_gpu": answer_tokens_per_s,
}


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row and what was predicted for it.

    Attributes:
        reason: why there is no prediction; empty where there is one.
        relative_error: prediction over measurement, minus 1.
    """

    row: Row
    predicted: float | None = None
    null_predicted: float | None = None
    reason: str = ""

    @property
    def covered(self) -> bool:
        """Whether there is a prediction."""
        return self.predicted is not None

    @property
    def is_fit(self) -> bool:
        """Whether constants were fitted to it."""
        return any(fnmatch(self.row.id, pattern) for pattern in FIT_ROWS)

    @property
    def relative_error(self) -> float | None:
        """Prediction over measurement, minus 1."""
        return None if self.predicted is None else self.predicted / self.row.value - 1

    @property
    def null_relative_error(self) -> float | None:
        """The same of the null model."""
        return None if self.null_predicted is None else self.null_predicted / self.row.value - 1


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Errors of all covered rows of a kind that one source has, as fractions."""

    source: str
    kind: str
    n: int
    mape: float
    bias: float
    max: float
    null_mape: float
    null_max: float


@dataclass(frozen=True, slots=True)
class Report:
    """All rows in the order given."""

    rows: tuple[ScoredRow, ...]

    @property
    def sources(self) -> tuple[SourceScore, ...]:
        """Scores by source and kind."""
        return score_sources(self.rows)

    @property
    def fit_sources(self) -> tuple[SourceScore, ...]:
        """Scores of the rows that constants were fitted to."""
        return score_sources([row for row in self.rows if row.is_fit])

    @property
    def test_sources(self) -> tuple[SourceScore, ...]:
        """Scores of the rows that nothing was fitted to."""
        return score_sources([row for row in self.rows if not row.is_fit])

    def to_json(self) -> dict[str, Any]:
        """For a file; errors are fractions."""
        rows = [
            {
                "id": each.row.id, "covered": each.covered, "reason": each.reason or None, "predicted": each.predicted,
                "measured": each.row.value, "unit": each.row.unit, "relative_error": each.relative_error,
                "null_relative_error": each.null_relative_error,
            }
            for each in self.rows
        ]  # fmt: skip
        names = SourceScore.__slots__
        return {"rows": rows, "sources": [{name: getattr(each, name) for name in names} for each in self.sources]}


def score_rows(rows: Sequence[Row]) -> Report:
    """Predict every row, and fit the null model's constants to those that have a prediction."""
    answers = [answer_row(row) for row in rows]
    ratios: dict[tuple[str, str], list[float]] = {}
    for row, answer in zip(rows, answers, strict=True):
        if isinstance(answer, Answer):
            ratios.setdefault((row.source, row.kind), []).append(row.value / answer.base)
    return Report(
        tuple(
            ScoredRow(row, answer.predicted, answer.base * find_null_constant(ratios[row.source, row.kind]))
            if isinstance(answer, Answer)
            else ScoredRow(row, reason=answer)
            for row, answer in zip(rows, answers, strict=True)
        )
    )


def answer_row(row: Row) -> Answer | str:
    """A prediction, or why there is none."""
    answer = _ANSWERS.get(row.kind)
    if answer is None:
        return f"there is no prediction of kind {row.kind!r}"
    try:
        return answer(row)
    except NotCovered as reason:
        return str(reason)
    except PlaitError as error:
        return error.message


def find_null_constant(ratios: Sequence[float]) -> float:
    """The constant whose largest relative error over measurements `ratio * base` is smallest."""
    return 2 / (1 / min(ratios) + 1 / max(ratios))


def score_sources(rows: Sequence[ScoredRow]) -> tuple[SourceScore, ...]:
    """Scores by source and kind of the rows that are covered."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for each in rows:
        if each.relative_error is not None and each.null_relative_error is not None:
            pair = (each.relative_error, each.null_relative_error)
            groups.setdefault((each.row.source, each.row.kind), []).append(pair)
    return tuple(
        SourceScore(
            source, kind, len(pairs),
            mape=_mean([abs(error) for error, _ in pairs]), bias=_mean([error for error, _ in pairs]),
            max=max(abs(error) for error, _ in pairs), null_mape=_mean([abs(null) for _, null in pairs]),
            null_max=max(abs(null) for _, null in pairs),
        )
        for (source, kind), pairs in groups.items()
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
