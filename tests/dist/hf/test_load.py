import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.comm.launch import LocalRanks
from plait.comm.mesh import Mesh, build_mesh
from plait.errors import CheckpointError, ConfigError
from plait.hf.directory.source import take_part
from plait.hf.load import list_stored, load_pretrained
from plait.parallel.apply import ownership_of
from plait.parallel.shard import shard_tensor
from plait.sharding import MeshShape
from tests.support.hf_models import CONFIGS, build_hf_model, save_hf_model

Ranks = Callable[[int], LocalRanks]

FILES = {"one file": "5GB", "many files": "4KB"}


def _mesh(tp: int) -> Mesh:
    return build_mesh(MeshShape(tp=tp))


def _find_differing(path: Path, tp: int, dtype: str | None = None) -> list[str]:
    """Load, and name the parameters of this rank that are not its part of what transformers loads."""
    from transformers import AutoModelForCausalLM

    mesh = _mesh(tp)
    wanted = None if dtype is None else getattr(torch, dtype)
    model = load_pretrained(path, mesh, dtype=wanted)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=wanted or "auto")
    expected, stored, ownership = whole.state_dict(), list_stored(model), ownership_of(model)
    differing = [
        name
        for name, param in model.named_parameters()
        if not torch.equal(
            param,
            shard_tensor(take_part(expected[stored[name].name], stored[name]), ownership[name], mesh.tp.rank),
        )
    ]
    buffers = dict(whole.named_buffers())
    differing += [
        name for name, buffer in model.named_buffers() if name in buffers and not torch.equal(buffer, buffers[name])
    ]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not model.training
    return differing


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_has_its_part_of_what_transformers_loads(
    ranks: Ranks, tmp_path: Path, name: str, tp: int, files: str
) -> None:
    save_hf_model(tmp_path, name, max_shard_size=FILES[files])
    assert ranks(tp).call(_find_differing, path=tmp_path, tp=tp) == [[]] * tp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_that_of_the_config_unless_given(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    save_hf_model(tmp_path, "gpt2", dtype=torch.bfloat16)
    assert ranks(2).call(_dtypes, path=tmp_path, dtype=None) == [["torch.bfloat16"]] * 2
    assert ranks(2).call(_dtypes, path=tmp_path, dtype=dtype) == [[f"torch.{dtype}"]] * 2
    assert ranks(2).call(_find_differing, path=tmp_path, tp=2, dtype=dtype) == [[]] * 2


def _dtypes(path: Path, dtype: str | None) -> list[str]:
    model = load_pretrained(path, _mesh(2), dtype=None if dtype is None else getattr(torch, dtype))
    return sorted({str(param.dtype) for param in model.parameters()})


def test_a_checkpoint_of_the_base_model_lacks_its_prefix(ranks: Ranks, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "gpt2")
    bare = {name.removeprefix("transformer."): value for name, value in _read(tmp_path).items()}
    _write(tmp_path, {**bare, "h.0.attn.bias": torch.ones(1, 1, 32, 32)})
    assert ranks(2).call(_load, path=tmp_path, tp=2) == [None] * 2


def _load(path: Path, tp: int) -> None:
    load_pretrained(path, _mesh(tp))


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _read_error(ranks: Ranks, path: Path, kind: type[Exception] = CheckpointError, tp: int = 2) -> str:
    with pytest.raises(kind) as caught:
        ranks(tp).call(_load, path=path, tp=tp)
    return str(caught.value)


def test_what_does_not_fit_is_listed(ranks: Ranks, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama")
    tensors = _read(tmp_path)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(66, 24)
    _write(tmp_path, tensors)
    assert _read_error(ranks, tmp_path).splitlines() == [
        f"{tmp_path}: does not hold the weights of this model",
        "  1 missing:",
        "  - model.norm.weight",
        "  1 unexpected:",
        "  - model.extra",
        "  1 of another shape:",
        "  - lm_head.weight is [66, 24], and [67, 24] in the model",
        "",
        "hint: check that config.json and the weights belong together",
    ]


def test_tied_weights_may_be_there_twice_but_only_with_the_same_values(ranks: Ranks, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama-tied")
    tensors = _read(tmp_path)
    head = tensors["model.embed_tokens.weight"].clone()
    _write(tmp_path, {**tensors, "lm_head.weight": head})
    assert ranks(2).call(_find_differing, path=tmp_path, tp=2) == [[], []]
    head[66, 23] += 1
    _write(tmp_path, {**tensors, "lm_head.weight": head})
    message = _read_error(ranks, tmp_path)
    assert "model.embed_tokens.weight and lm_head.weight differ, but the config ties them" in message


def test_tied_weights_may_be_there_under_the_other_name(ranks: Ranks, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama-tied")
    tensors = _read(tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    _write(tmp_path, tensors)
    assert ranks(2).call(_find_differing, path=tmp_path, tp=2) == [[], []]


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _forget_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _forget_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _change_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (_truncate, CheckpointError, "model.safetensors: cannot be read"),
        (_forget_weights, CheckpointError, "has no weights"),
        (_forget_config, ConfigError, "has no config.json"),
        (_change_config(model_type="unheard_of"), ConfigError, "transformers does not take it"),
        (_change_config(model_type="t5"), ConfigError, "t5"),
        (_change_config(quantization_config={"quant_method": "bitsandbytes"}), ConfigError, "quantized weights"),
        (_change_config(num_hidden_layers=3), CheckpointError, "9 missing"),
    ],
    ids=["truncated", "no weights", "no config", "unknown", "no decoder", "quantized", "too few layers"],
)
def test_a_directory_that_cannot_be_loaded_is_one_error_of_all_ranks(
    ranks: Ranks, tmp_path: Path, damage: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    save_hf_model(tmp_path, "llama")
    damage(tmp_path)
    said = _read_error(ranks, tmp_path, kind)
    assert message in said
    assert "rank 0" not in said


def test_a_file_that_one_rank_cannot_read_is_an_error_of_all(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        save_hf_model(tmp_path / str(rank), "llama")
    _truncate(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"^rank 1: .*model.safetensors: cannot be read"):
        ranks(2).call(_load_own, path=tmp_path)


def _load_own(path: Path) -> None:
    mesh = _mesh(2)
    load_pretrained(path / str(mesh.rank), mesh)


def test_a_degree_that_cannot_be_is_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    assert "cannot be cut over 4 ranks" in _read_error(ranks, tmp_path, ConfigError, tp=4)


def _measure_peak_bytes(path: Path, tp: int) -> tuple[int, int]:
    """The most memory that loading had allocated at a time, and the bytes of this rank's part.

    The file is mapped, which is counted like an allocation of all of it, but is none: what is read of it is the page
    cache, shared by all ranks, and given up when memory is needed.
    """
    from torch.profiler import ProfilerActivity, profile

    mesh = _mesh(tp)
    load_pretrained(path, mesh)  # imports and first uses
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = load_pretrained(path, mesh)
    assert recorded.profiler is not None
    held = peak = 0
    file_bytes = (path / "model.safetensors").stat().st_size
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) != file_bytes:
            held += event.nbytes()
            peak = max(peak, held)
    return peak, sum(param.numel() * param.element_size() for param in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_never_has_more_in_memory_than_its_part(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    """Also where the files hold another dtype, and transposed tensors."""
    save_hf_model(tmp_path, "gpt2", n_embd=192, n_inner=768, n_layer=4, dtype=getattr(torch, dtype))
    _change_config(dtype="float32")(tmp_path)
    small = 1 << 17  # buffers, messages
    for peak, part in ranks(3).call(_measure_peak_bytes, path=tmp_path, tp=3):
        assert part > 10 * small
        assert peak < part + small


def test_what_loads_generates_as_before(ranks: Ranks, tmp_path: Path) -> None:
    model = build_hf_model("llama")
    model.generation_config.update(max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    expected = model.generate(torch.tensor([[3, 9, 4]])).tolist()
    assert ranks(2).call(_generate, path=tmp_path) == [expected] * 2


def _generate(path: Path) -> Any:
    return load_pretrained(path, _mesh(2)).generate(torch.tensor([[3, 9, 4]])).tolist()  # type: ignore[operator]
