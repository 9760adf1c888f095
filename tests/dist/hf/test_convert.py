"""`plait convert` there and back, and its errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.names import model_name
from plait.checkpoint.part import build_owned
from plait.checkpoint.read import Checkpoint
from plait.checkpoint.sharded import load_checkpoint
from plait.cli.main import main
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.model import LlamaConfig
from plait.hf.convert.origin import open_checkpoint
from plait.hf.load import load_pretrained
from plait.models.registry import build_model
from plait.parallel.apply import ownership_of
from plait.sharding import MeshShape, Ownership
from plait.train.loop import train
from tests.support.byte_tokenizer import save_byte_tokenizer
from tests.support.file_limit import limited
from tests.support.hf_models import CONFIGS, save_hf_model

Ranks = Callable[[int], LocalRanks]


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str, str]:
    capsys.readouterr()  # what transformers said when it saved
    with pytest.raises(SystemExit) as caught:
        main(["convert", *map(str, arguments)])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def _convert(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = _run(capsys, *arguments)
    assert status == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_byte_for_byte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, tp: int
) -> None:
    source = save_hf_model(tmp_path / "a", name, max_shard_size=8192, dtype=torch.bfloat16)
    (source / "tokenizer.json").write_text("{}")
    there = _convert(capsys, source, tmp_path / "b", "--tp", tp)
    assert there["form"] == "plait"
    assert len(list((tmp_path / "b").glob("*.distcp"))) == tp
    back = _convert(capsys, tmp_path / "b", tmp_path / "c", "--max-shard-size", 8192)
    assert (back["form"], back["size_bytes"]) == ("hf", there["size_bytes"])
    assert _read_files(tmp_path / "c") == _read_files(source)
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == names
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_through_a_native_checkpoint_and_back_is_byte_for_byte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    source = save_hf_model(tmp_path / "a", name)
    _convert(capsys, source, tmp_path / "b", "--to", "native", "--tp", 2)
    _convert(capsys, tmp_path / "b", tmp_path / "c")
    assert _read_files(tmp_path / "c") == _read_files(source)


def test_a_checkpoint_is_cut_anew(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "gpt2")
    _convert(capsys, source, tmp_path / "b", "--tp", 2)
    _convert(capsys, tmp_path / "b", tmp_path / "c", "--to", "plait", "--tp", 3)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 3
    _convert(capsys, tmp_path / "c", tmp_path / "d")
    assert _read_files(tmp_path / "d") == _read_files(source)


def _find_unlike(path: Path, checkpoint: Path, tp: int) -> list[str]:
    """Parameters of this rank that differ between a directory and the checkpoint made of it; it reads its own file."""
    mesh = build_mesh(MeshShape(tp=tp))
    model = load_pretrained(path, mesh)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    ownership = ownership_of(model)
    owned = {
        model_name(name): build_owned(ownership[name], param.detach().zero_(), mesh.tp.rank) for name, param in model.named_parameters()
    }
    load_checkpoint(checkpoint, owned, mesh)
    return [name for name, param in model.named_parameters() if not torch.equal(param, expected[name])]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_fits_the_parallel_model(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    source = save_hf_model(tmp_path / "a", name)
    _convert(capsys, source, tmp_path / "b", "--tp", 2)
    assert ranks(2).call(_find_unlike, path=source, checkpoint=tmp_path / "b", tp=2) == [[], []]
    assert ranks(3).call(_find_unlike, path=source, checkpoint=tmp_path / "b", tp=3) == [[], [], []]


def test_a_rank_reads_its_own_file_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The cut is that of training at this degree: every piece is what a rank owns."""
    source = save_hf_model(tmp_path / "a", "gpt2")
    _convert(capsys, source, tmp_path / "b", "--tp", 3)
    checkpoint = Checkpoint.from_folder(tmp_path / "b")
    query = checkpoint.list_pieces("model.transformer.h.0.attn.c_attn.q.weight")
    assert [len(rows) for rows, _ in query] == [8, 8, 8]
    up = checkpoint.list_pieces("model.transformer.h.0.mlp.c_fc.weight")
    assert [len(rows) for rows, _ in up] == [13, 12, 12]


@pytest.mark.parametrize("to", ["hf", "plait"])
def test_numbers_are_rounded_if_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path, to: str) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    _convert(capsys, source, tmp_path / "b", "--to", to, "--dtype", "bfloat16")
    if to == "plait":
        _convert(capsys, tmp_path / "b", tmp_path / "c")
    target = tmp_path / ("c" if to == "plait" else "b")
    expected = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    read = load_file(target / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_files_are_made_smaller_without_the_model_being_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "unheard_of"}')
    tensors = {name: torch.arange(100.0) for name in "abc"}
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    _convert(capsys, tmp_path / "a", tmp_path / "b", "--to", "hf", "--max-shard-size", "800")
    assert sorted(path.name for path in (tmp_path / "b").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_what_is_there_already_is_replaced_only_if_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    _convert(capsys, source, tmp_path / "b")
    status, out, err = _run(capsys, source, tmp_path / "b")
    assert (status, out) == (2, "")
    assert f"error: {tmp_path / 'b'}: exists already" in err
    _convert(capsys, source, tmp_path / "b", "--overwrite", "--tp", 2)
    assert len(list((tmp_path / "b").glob("*.distcp"))) == 2


def _expect_error(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    """One clear error, and nothing left behind."""
    before = sorted(folder.rglob("*"))
    status, out, err = _run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert sorted(folder.rglob("*")) == before
    return err


def test_a_full_disk_is_one_error_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    for to in ("hf", "plait", "native"):
        with limited(1 << 13):
            message = _expect_error(capsys, tmp_path, source, tmp_path / "out", "--to", to)
        assert f"{'safetensors' if to == 'hf' else 'distcp'}: cannot be written (File too large)" in message


def _train_on_text(folder: Path, *overrides: str) -> Path:
    """A native run over ranks, on text: its checkpoint."""
    (folder / "text.txt").write_text("to be or not to be, that is the question " * 20)
    settings = [
        "name=nano", f"out_dir={folder}", "model.vocab_size=257", "precision.compute=float32", "data.kind=text",
        f"data.paths={folder / 'text.txt'}", f"data.tokenizer={save_byte_tokenizer(folder)}", "train.steps=2",
        "train.seq_len=16", *overrides,
    ]  # fmt: skip
    run = load_training_config("smollm-tiny", settings)
    mesh = build_mesh(run.parallel.mesh_shape)
    return train(run, mesh).checkpoint


def test_what_was_trained_here_is_written_for_everybody_with_its_tokenizer(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (checkpoint, _) = ranks(2).call(_train_on_text_of_two, folder=tmp_path)
    _convert(capsys, checkpoint, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.eos_token_id, tokenizer.decode(tokenizer("question").input_ids)) == (256, "question")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    assert theirs.config.eos_token_id == 256
    origin = open_checkpoint(checkpoint)
    assert isinstance(origin.native, LlamaConfig)
    model = build_model(origin.native)
    ours = {name: build_owned(Ownership(name, tuple(p.shape)), p.detach()) for name, p in model.named_parameters()}
    load_checkpoint(checkpoint, {model_name(name): owned for name, owned in ours.items()}, build_mesh(MeshShape()))
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert (model.double()(tokens) - theirs(tokens).logits[0]).abs().max() < 1e-4
    (tmp_path / "tokenizer.json").unlink()
    _convert(capsys, checkpoint, tmp_path / "b", "--to", "plait")
    status, _, err = _run(capsys, tmp_path / "b", tmp_path / "c")
    assert status == 0
    assert f"note: the tokenizer of the run, {tmp_path / 'tokenizer.json'}, is not there any more" in err


def _train_on_text_of_two(folder: Path) -> Path:
    return _train_on_text(folder, "parallel.tp=2")


def test_what_is_neither_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in _expect_error(capsys, tmp_path, tmp_path / "nowhere", target)
    assert "is neither a Hugging Face directory nor a checkpoint of plait" in _expect_error(
        capsys, tmp_path, tmp_path / "empty", target
    )
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert (
        f"hint: the newest checkpoint there is {tmp_path / 'run' / 'checkpoints' / 'step-00000007'}"
        in _expect_error(capsys, tmp_path, tmp_path / "run", target)
    )


def test_a_damaged_source_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    _convert(capsys, source, tmp_path / "b", "--tp", 2)
    file = tmp_path / "b" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "b: is damaged" in _expect_error(capsys, tmp_path, tmp_path / "b", tmp_path / "out")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for to in ("plait", "native", "hf"):
        message = _expect_error(capsys, tmp_path, source, tmp_path / "out", "--to", to)
        assert "model.safetensors: cannot be read" in message


def test_a_model_that_is_none_of_ours_does_not_become_native(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = save_hf_model(tmp_path / "a", "phi3")
    message = _expect_error(capsys, tmp_path, source, tmp_path / "out", "--to", "native")
    assert 'model_type = "phi3" is not supported' in message
    _convert(capsys, source, tmp_path / "b")
    message = _expect_error(capsys, tmp_path, tmp_path / "b", tmp_path / "out", "--to", "native")
    assert "is a checkpoint of a model of transformers, not of a native one" in message


def test_source_and_target_are_kept_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    for target in (source / "inside", tmp_path / "a" / ".." / "a"):
        assert "error: " in _expect_error(capsys, tmp_path, source, target, "--overwrite")


def test_a_degree_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = save_hf_model(tmp_path / "a", "llama")
    assert "7 ranks" in _expect_error(capsys, tmp_path, source, tmp_path / "out", "--tp", 7)


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = _expect_error(capsys, tmp_path, tmp_path, tmp_path / "out", "--max-shard-size", "big")
    assert '"big" is not a size of a file' in message
