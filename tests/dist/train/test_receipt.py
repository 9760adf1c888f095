"""The receipt of a training run: shown once, written, and in strict runs compared with what was asked."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.run import RunConfig
from plait.errors import ConfigError, TransportError
from plait.overlap.receipt import Receipt
from plait.overlap.stages import merge_receipts
from plait.train import log
from plait.train.loop import Summary, train
from plait.train.metrics import read_metrics
from tests.support.quantized import build_config
from tests.support.training import LLAMA, build_run

STEPS, MICRO_BATCHES = 3, 2
TIMEOUT_S = 10.0


def build(folder: Path, pp: int = 1, **overlap: Any) -> RunConfig:
    run = build_run(
        folder,
        model=LLAMA,
        parallel={"tp": 2, "pp": pp},
        name=f"pp{pp}",
        steps=STEPS,
        gradient_accumulation=MICRO_BATCHES,
        micro_batch_size=2,
    )
    return run.model_copy(update={"overlap": OverlapConfig(**overlap)})


def run_training(run: RunConfig) -> Summary:
    return train(run, build_mesh(run.parallel.mesh_shape))


def test_receipt_is_written_with_what_every_pass_waited(ranks: Any, tmp_path: Path) -> None:
    summaries = ranks(2).call(run_training, run=build(tmp_path, policy="full", method="direct", chunks=2))
    receipt = json.loads(summaries[0].receipt.read_text())
    assert receipt["asked"] == "full method=direct chunks=2"
    assert {(line["method"], line["chunks"]) for line in receipt["lines"]} == {("direct", 2)}
    assert {line["num_measured"] for line in receipt["lines"]} == {STEPS * MICRO_BATCHES}
    assert all(line["measured_exposed_s"] > 0 for line in receipt["lines"])
    assert summaries[0].receipt == summaries[0].metrics.with_name("receipt.json")
    assert [path.name for path in tmp_path.rglob(".writing-*")] == []


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_receipt_counts_bytes_in_the_dtype_that_is_computed_in(ranks: Any, tmp_path: Path, compute: str) -> None:
    run = build(tmp_path, policy="full", method="direct", chunks=1)
    run = run.model_copy(update={"precision": PrecisionConfig(compute=compute)})
    lines = json.loads(ranks(2).call(run_training, run=run)[0].receipt.read_text())["lines"]
    [line] = [each for each in lines if each["operation"] == "column forward" and "0.mlp" in each["label"]]
    assert line["sent_bytes"] == run.tokens_per_micro_batch // 2 * LLAMA.width * {"float32": 4, "bfloat16": 2}[compute]


def test_strict_run_ends_after_its_first_step_and_saves_nothing(ranks: Any, tmp_path: Path) -> None:
    run = build(tmp_path, policy="full", method="bulk", strict=True)
    with pytest.raises(ConfigError, match="overlap.strict = true: 7 problems") as caught:
        ranks(2).call(run_training, run=run)
    assert "layers.0-1.attention.wo, row forward" in caught.value.message
    folder = tmp_path / "runs" / run.name
    assert read_metrics(folder / "metrics.jsonl") == []
    assert not (folder / "receipt.json").exists()
    assert not list(folder.glob("checkpoints/step-*"))


def test_no_receipt_of_another_mesh_is_left(ranks: Any, tmp_path: Path) -> None:
    run = build(tmp_path, policy="full", method="direct", chunks=1)
    receipt = ranks(2).call(run_training, run=run)[0].receipt
    assert receipt.exists()
    alone = {"parallel": ParallelConfig(), "overlap": OverlapConfig()}
    assert ranks(1).call(run_training, run=run.model_copy(update=alone))[0].receipt is None
    assert not receipt.exists()


def test_a_run_that_has_nothing_left_to_do_keeps_its_receipt(ranks: Any, tmp_path: Path) -> None:
    run = build(tmp_path, policy="full", method="direct", chunks=1)
    text = ranks(2).call(run_training, run=run)[0].receipt.read_text()
    assert ranks(2).call(run_training, run=run)[0].receipt.read_text() == text


def test_a_pipeline_has_one_receipt_of_all_its_stages(ranks: Any, tmp_path: Path) -> None:
    """The lines of a run without stages, all of them measured: what is sent and how does not depend on stages."""
    told = []
    for pp in (1, 2):
        run = build(tmp_path, pp, policy="full", method="direct", chunks=2)
        receipt = json.loads(ranks(2 * pp).call(run_training, run=run)[0].receipt.read_text())
        assert {line["num_measured"] for line in receipt["lines"]} == {STEPS * MICRO_BATCHES}
        told.append({(line["label"], line["operation"], line["sent_bytes"]) for line in receipt["lines"]})
    assert told[0] == told[1]
    assert any("layers.1." in label for label, *_ in told[1])


def lose_the_last_rank(run: RunConfig) -> None:
    """On each rank: one is killed when the stages put the receipt together."""
    gather = log.gather_receipt

    def die(*arguments: Any) -> Any:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*arguments)

    with patch.object(log, "gather_receipt", die):
        run_training(run)


def test_a_rank_that_is_lost_when_the_receipt_is_put_together_ends_the_run(tmp_path: Path) -> None:
    with (
        LocalRanks(4, timeout_s=TIMEOUT_S, device_type="cpu") as fresh,
        pytest.raises(TransportError, match=r"^rank 3 .*died: killed by SIGKILL"),
    ):
        fresh.call(lose_the_last_rank, run=build(tmp_path, 2, policy="full", method="direct", chunks=2))


def test_stages_that_say_less_are_not_heard() -> None:
    """Of a pipeline on one tp rank, whose first stage has nothing quantized."""
    empty, told = Receipt(asked="disabled", note="nothing"), Receipt(asked="disabled", note="nothing; mxfp8: emulated")
    assert merge_receipts([empty, told]) == told
    assert merge_receipts([told, empty]) == told


def test_one_rank_says_what_multiplies_under_a_recipe(ranks: Any, tmp_path: Path) -> None:
    run = build_run(tmp_path, model=LLAMA, steps=1).model_copy(
        update={"quantization": build_config("fp8_currentscaling")}
    )
    [summary] = ranks(1).call(run_training, run=run)
    receipt = json.loads(summary.receipt.read_text())
    assert receipt["lines"] == []
    assert "fp8_currentscaling: emulated, float32 accumulator" in receipt["note"]
