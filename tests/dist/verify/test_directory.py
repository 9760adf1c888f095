"""The step of `plait train` on a Hugging Face directory is that of transformers in float64, on every mesh."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.config.load import load_run_config, load_training_config
from plait.config.run import FineTuneConfig
from plait.contract.context.mask import AttentionMask
from plait.contract.axis.directory import Owned, derive_directory_collectives
from plait.contract.training import derive_run_model, derive_step_collectives
from plait.parallel.context import ring, sequences
from plait.parallel.context.core import ContextParallelAttention
from plait.sharding import Ownership
from plait.train import step
from plait.verify.finetune.parity import check_directory_parity
from plait.verify.finetune.promises import Promises
from plait.verify.finetune.twin import Twin, run_twin
from plait.verify.report import Report
from tests.support.context_faults import (
    count_positions_from_zero,
    forget_documents,
    keep_gradients_of_own_keys_only,
    take_labels_of_another_rank,
)
from tests.support.hf_models import save_hf_model
from tests.support.mutations import MutatedRanks, Slip

MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ()),
    "mistral": ("llama", {"model_type": "mistral", "sliding_window": 4}, ()),
    "gpt2": ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, ()),
    "lora": ("llama", {}, ("model.lora.rank=4", "model.lora.dropout=0.1")),
    "lora-gpt2": ("gpt2", {}, ("model.lora.rank=4", "model.lora.dropout=0.1")),
}
"""The kind of test model, fields of its config, overrides of the run."""

SMALL = ("precision.compute=float32", "train.micro_batch_size=2", "train.seq_len=11")
"""Eleven tokens: no degree divides them."""


PACKED = ('data.kind="tokens"', 'data.paths=["none.npy"]', "data.end_of_text_id=0", "data.mask_documents=true")


class Verify:
    """Verifications of small directories; what transformers computes is kept for each model and batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.twins: dict[tuple[str, int, bool], Twin] = {}

    def save(self, case: str) -> Path:
        """The directory of a case."""
        kind, fields, _ = MODELS[case]
        model = self.folder / case
        return model if model.exists() else save_hf_model(model, kind, **fields)

    def build(self, case: str, *overrides: str) -> FineTuneConfig:
        """A run on it."""
        file = self.folder / "run.toml"
        file.write_text(f'seed = 11\n[model]\npath = "{self.save(case)}"\n')
        run = load_training_config(str(file), [*SMALL, *MODELS[case][2], *overrides])
        assert isinstance(run, FineTuneConfig)
        return run

    def __call__(self, ranks: Any, case: str, *overrides: str) -> Report:
        """The report of one verification."""
        run = self.build(case, *overrides)
        key = (case, run.tokens_per_step, run.masks_documents)
        if key not in self.twins:
            self.twins[key] = run_twin(run)
        return check_directory_parity(run, ranks, self.twins[key])


@pytest.fixture(scope="module")
def verify(tmp_path_factory: pytest.TempPathFactory) -> Verify:
    return Verify(tmp_path_factory.mktemp("directories"))


def check(verify: Verify, ranks: Any, case: str, mesh: dict[str, int], *overrides: str) -> Report:
    asked = [f"parallel.{axis}={degree}" for axis, degree in mesh.items()]
    report = verify(ranks(prod(mesh.values())), case, *asked, *overrides)
    assert report.passed, report.failures
    return report


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_every_method_and_order(ranks, verify, case, cp, method, order):
    report = check(verify, ranks, case, {"cp": cp}, f"context.method={method}", f"context.order={order}")
    messages = {"ring messages"} if method == "ring" else set()
    assert {trace.what for trace in report.traces} == {"collectives"} | messages
    assert all(trace.num_promised for trace in report.traces if trace.what == "collectives")


@pytest.mark.parametrize("mode", ["true", "false"], ids=["sp", "ar"])
@pytest.mark.parametrize("case", MODELS)
def test_with_tensor_parallelism(ranks, verify, case, mode):
    check(verify, ranks, case, {"cp": 2, "tp": 2}, f"parallel.sequence_parallel={mode}")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", ["mistral", "lora"])
def test_with_parameters_that_ranks_share_out(ranks, verify, case, recompute):
    mesh = {"cp": 2, "dp_shard": 2}
    check(verify, ranks, case, mesh, f"train.recompute={recompute}", "train.gradient_accumulation=2")


def test_with_all_of_them(ranks, verify):
    check(verify, ranks, "llama", {"cp": 2, "dp_shard": 2, "tp": 2}, "train.recompute=full", "overlap=full")


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_whole_sequences(ranks, verify, mesh):
    check(verify, ranks, "mistral", mesh)


WHERE = ({"tp": 1}, {"tp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}, {"cp": 2, "dp_shard": 2})


@pytest.mark.parametrize(("case", "mesh"), [*(("mistral", mesh) for mesh in WHERE), ("lora", {"cp": 2})], ids=str)
def test_packed_documents(ranks, verify, case, mesh):
    """Each is attended alone, and counts its positions from 0."""
    check(verify, ranks, case, mesh, "train.gradient_accumulation=2", *PACKED)


@pytest.mark.parametrize("dp_shard", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_what_is_promised_is_what_a_model_of_our_own_promises(verify, method, recompute, dp_shard):
    asked = ("parallel.cp=2", f"parallel.dp_shard={dp_shard}", f"context.method={method}")
    asked = (*asked, f"train.recompute={recompute}")
    run, own = verify.build("llama", *asked), load_run_config(str(verify.save("llama")), [*SMALL, *asked])
    promises = Promises(run)
    owned = {name: Owned(Ownership(name, tuple(p.shape)), True) for name, p in promises.model.named_parameters()}
    promised = derive_directory_collectives(run, promises.describe(owned, 0))
    assert promised == derive_step_collectives(own, derive_run_model(own))


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, tuple[str, ...]]] = {
    "rotary positions": (count_positions_from_zero, "llama", ()),
    "learned positions": (count_positions_from_zero, "gpt2", ()),
    "labels": (take_labels_of_another_rank, "llama", ("train.seq_len=8",)),  # as many on both ranks
    "gradients of keys": (keep_gradients_of_own_keys_only, "lora", ()),
    "documents": (forget_documents, "llama", PACKED),
}


def run_wrongly(fault: str, wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with FAULTS[fault][0]():
        return wrapped(**arguments)


class Wrong:
    """Ranks on which every call is made with a mistake."""

    def __init__(self, ranks: Any, fault: str) -> None:
        self._ranks, self._fault = ranks, fault

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        return self._ranks.call(run_wrongly, fault=self._fault, wrapped=function, arguments=kwargs)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_follow_the_tokens_is_found(ranks, verify, fault):
    report = verify(Wrong(ranks(2), fault), FAULTS[fault][1], "parallel.cp=2", *FAULTS[fault][2])
    assert not all(row.passed for row in report.rows)


@pytest.mark.parametrize("how", ["drop", "average", "repeat"])
@pytest.mark.parametrize("index", range(8))
def test_every_mistake_with_a_collective_is_found(ranks, verify, index, how):
    """Keys and values of two layers, these again with the sums of their gradients, totals, gradients of parameters."""
    report = verify(MutatedRanks(ranks(2), Slip(index, how)), "llama", "parallel.cp=2", "context.method=all_gather")
    numbers_hold = all(row.passed for row in report.rows)
    traces_hold = all(check.passed for check in report.traces)
    assert (numbers_hold, traces_hold) == (how == "repeat", how != "repeat"), report.failures
