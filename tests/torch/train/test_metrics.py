import json
import resource
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from plait.config.hf.checkpoint import derive_checkpoint_fields
from plait.config.hf.read import load_hf_fields
from plait.config.model import GptConfig, ModelConfig
from plait.config.run import FineTuneConfig
from plait.errors import ConfigError
from plait.hf.directory.skeleton import build_skeleton
from plait.train.metrics import (
    MetricsFile,
    Rates,
    count_step_flops,
    derive_step_flops,
    find_peak_flops_per_s,
    read_metrics,
)
from tests.support.hf_models import save_hf_model
from tests.support.training import GPT, build_run

CPU = torch.device("cpu")


def _write(path: Path, steps: range, *, resumed_step: int = 0, loss: float = 1.0, tensorboard: bool = False) -> None:
    with MetricsFile(path, resumed_step=resumed_step, tensorboard=tensorboard) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": loss, "mfu": None})


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    _write(path, range(1, 8))
    with path.open("a") as torn:
        torn.write('{"step": 8, "lo')
    _write(path, range(6, 9), resumed_step=5, loss=2.0)
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]


@pytest.mark.parametrize("line", [b"[1]", b"3", b'{"a": 2}', b'{"step": "6"}', b"\xff\xfe", b""], ids=repr)
def test_a_file_that_someone_wrote_into_is_read_up_to_there(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    path.write_bytes(path.read_bytes() + line + b'\n{"step": 3}\n')
    _write(path, range(6, 7), resumed_step=5)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 6]


def test_every_line_is_json_also_when_a_value_is_not_finite(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.jsonl", range(1, 2), loss=float("nan"))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "mfu": null}\n'
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def test_tensorboard_gets_the_same_values(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _write(tmp_path / "metrics.jsonl", range(1, 4), loss=2.5, tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 2.5), (3, 2.5)]
    assert events.Tags()["scalars"] == ["loss"]


def test_a_disk_that_is_full_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"metrics.jsonl: cannot be written .File too large"):
            _write(tmp_path / "metrics.jsonl", range(1, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_that_cannot_be_written_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/metrics.jsonl: cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", resumed_step=0)


def test_flops_of_a_step_are_those_of_the_literature(tmp_path: Path) -> None:
    """72 B S L D^2 (1 + S/6D + V/12DL): Narayanan et al., arXiv:2104.04473, section 5.1, without recomputation."""
    run = build_run(tmp_path, model=GPT, parallel={"dp_replicate": 3}, gradient_accumulation=2)
    assert isinstance(run.model, GptConfig)
    B, S, D, L, V = 4, 16, run.model.width, run.model.num_layers, run.model.vocab_size
    assert derive_step_flops(run) == 3 * 2 * (72 * B * S * L * D**2 + 12 * B * S**2 * L * D + 6 * B * S * D * V)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_flops_of_a_hugging_face_model_are_those_of_the_native_one(tmp_path: Path, name: str) -> None:
    fields = load_hf_fields(save_hf_model(tmp_path / "model", name))
    native = build_run(tmp_path, model=TypeAdapter(ModelConfig).validate_python(fields))
    shape = derive_checkpoint_fields({"path": str(tmp_path / "model")})
    run = FineTuneConfig.model_validate({**native.model_dump(), "model": shape})
    model = build_skeleton(tmp_path / "model")
    assert count_step_flops(run, model) == derive_step_flops(native)
    model.requires_grad_(False)
    assert 0.6 < count_step_flops(run, model) / derive_step_flops(native) < 0.8


def test_rates_are_per_second_and_rank(tmp_path: Path) -> None:
    run = build_run(tmp_path, parallel={"dp_replicate": 2, "tp": 2})
    record = Rates.build(run, 800, CPU).measure(0.5)
    assert record["tokens_per_s"] == 2 * 4 * 16 / 0.5
    assert record["flops_per_s_per_rank"] == 800 / 4 / 0.5
    assert (record["peak_memory_bytes"] or 0) > 1e7


def test_no_mfu_is_given_where_no_peak_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rates.build(build_run(tmp_path), 1, CPU).measure(1.0)["mfu"] is None
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Unheard Of")
    assert find_peak_flops_per_s(cuda, "bfloat16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert find_peak_flops_per_s(cuda, "bfloat16") == 756e12
    assert find_peak_flops_per_s(cuda, "float32") is None
