"""Breaking anything that follows the tokens over context ranks makes a verification fail."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.contract.context.mask import AttentionMask
from plait.contract.training import derive_run_model, derive_step_collectives
from plait.parallel import dropout
from plait.parallel.context import ring, sequences
from plait.parallel.context.core import ContextParallelAttention
from plait.sharding import Kind
from plait.train import step
from tests.support.context_faults import (
    count_positions_from_zero,
    forget_documents,
    keep_gradients_of_own_keys_only,
    take_labels_of_another_rank,
)
from tests.support.mutations import Slip
from tests.support.verification import build_config, verify

SMALL = ("model.num_layers=1", "parallel.cp=2")
PACKED = ('data.kind="tokens"', 'data.paths=["none.npy"]', "data.end_of_text_id=0", "data.mask_documents=true")
GPT = ("model.attention_dropout=0.0", *SMALL)


def draw_masks_by_own_place() -> AbstractContextManager[Any]:
    return patch.object(dropout.Dropout, "_list_runs", lambda self, mesh, own: [own])


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, tuple[str, ...]]] = {
    "rotary positions": (count_positions_from_zero, "llama-tiny", SMALL),
    "learned positions": (count_positions_from_zero, "gpt-tiny", GPT),
    "dropout masks": (draw_masks_by_own_place, "gpt-tiny", GPT),
    "labels": (take_labels_of_another_rank, "llama-tiny", SMALL),
    "documents": (forget_documents, "llama-tiny", (*SMALL, *PACKED)),
    "gradients of keys": (keep_gradients_of_own_keys_only, "llama-tiny", SMALL),
}


def run_wrongly(fault: str, wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with FAULTS[fault][0]():
        return wrapped(**arguments)


def run_slipped(slip: Slip, wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with slip.make():
        return wrapped(**arguments)


class Wrong:
    """Ranks on which every call is made by `run` with a mistake."""

    def __init__(self, ranks: Any, run: Callable[..., Any], **mistake: Any) -> None:
        self._ranks, self._run, self._mistake = ranks, run, mistake

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        return self._ranks.call(self._run, wrapped=function, arguments=kwargs, **self._mistake)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_follow_the_tokens_is_found(ranks, fault):
    _, source, overrides = FAULTS[fault]
    report = verify(Wrong(ranks(2), run_wrongly, fault=fault), source, 1, *overrides)
    assert not all(row.passed for row in report.rows)


def list_slips():
    """With every collective where keys are gathered; with the exchanges where these take their place."""
    for method in ("all_gather", "all_to_all"):
        overrides = (*SMALL, f"context.method={method}")
        config = build_config("llama-tiny", 1, *overrides)
        for index, collective in enumerate(derive_step_collectives(config, derive_run_model(config))):
            is_placed = collective.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) and collective.dtype != "float64"
            if method == "all_to_all" and collective.kind is not Kind.ALL_TO_ALL:
                continue
            for how in ("drop", "average", "misplace", "repeat"):
                if how != "misplace" or is_placed:
                    yield pytest.param(overrides, Slip(index, how), id=f"{how}-{index}-{collective}".replace(" ", "_"))


@pytest.mark.parametrize(("overrides", "slip"), [*list_slips()])
def test_every_mistake_with_every_collective_is_found(ranks, overrides, slip):
    report = verify(Wrong(ranks(2), run_slipped, slip=slip), "llama-tiny", 1, *overrides)
    numbers_hold = all(row.passed for row in report.rows)
    traces_hold = all(check.passed for check in report.traces)
    is_repetition = slip.how == "repeat"
    assert (numbers_hold, traces_hold) == (is_repetition, not is_repetition), report.failures
