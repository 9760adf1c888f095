import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.errors import CheckpointError
from plait.hf.load import load_pretrained
from plait.hf.save import save_pretrained
from plait.sharding import MeshShape
from tests.support.hf_models import CONFIGS, save_hf_model

Ranks = Callable[[int], LocalRanks]


def _pass_through(source: Path, target: Path, shape: MeshShape, max_file_bytes: int = 10**9) -> None:
    mesh = build_mesh(shape)
    save_pretrained(load_pretrained(source, mesh), target, mesh, max_file_bytes=max_file_bytes, source=source)


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saved_comes_out_byte_for_byte(ranks: Ranks, tmp_path: Path, name: str, tp: int) -> None:
    source = save_hf_model(tmp_path / "a", name, max_shard_size=8192)
    ranks(tp).call(_pass_through, source=source, target=tmp_path / "b", shape=MeshShape(tp=tp), max_file_bytes=8192)
    files = _read_files(source)
    assert len(files) > 3
    assert _read_files(tmp_path / "b") == files
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "b" / file).read_text()) == json.loads((source / file).read_text())


def test_replicas_share_the_files(ranks: Ranks, tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "gpt2", max_shard_size=8192, dtype=torch.bfloat16)
    ranks(4).call(_pass_through, source=source, target=tmp_path / "b", shape=MeshShape(dp_replicate=2, tp=2), max_file_bytes=8192)
    assert _read_files(tmp_path / "b") == _read_files(source)


def test_one_file_needs_no_index_and_says_that_it_is_of_torch(ranks: Ranks, tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    ranks(2).call(_pass_through, source=source, target=tmp_path / "b", shape=MeshShape(tp=2))
    assert sorted(_read_files(tmp_path / "b")) == ["model.safetensors"]
    with safe_open(tmp_path / "b" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tokenizer_files_go_along(ranks: Ranks, tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(name)
    ranks(2).call(_pass_through, source=source, target=tmp_path / "b", shape=MeshShape(tp=2))
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(path.name for path in source.iterdir())


def test_a_folder_that_exists_is_one_error_and_stays(ranks: Ranks, tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    before = _read_files(source)
    with pytest.raises(CheckpointError, match="a: exists already"):
        ranks(2).call(_pass_through, source=source, target=source, shape=MeshShape(tp=2))
    assert _read_files(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def _save_on_full_disk(source: Path, target: Path, full_rank: int) -> None:
    mesh = build_mesh(MeshShape(tp=2))
    model = load_pretrained(source, mesh)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        save_pretrained(model, target, mesh, max_file_bytes=8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_of_one_rank_is_one_error_and_leaves_nothing(ranks: Ranks, tmp_path: Path, full_rank: int) -> None:
    source = save_hf_model(tmp_path / "a", "gpt2")
    with pytest.raises(CheckpointError, match=rf"^rank {full_rank}: .*safetensors: cannot be written \(File too large"):
        ranks(2).call(_save_on_full_disk, source=source, target=tmp_path / "b", full_rank=full_rank)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
