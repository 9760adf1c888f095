"""One rank after another writes and reads its part, without a process group: any degrees, every kind of ownership."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.checkpoint.index import Index
from plait.checkpoint.names import file_name
from plait.checkpoint.part import Tensors, build_index, build_owned, check_part, load_part, save_part
from plait.config.model import GptConfig
from plait.config.presets import load_preset
from plait.contract.model import derive_ownership
from plait.errors import CheckpointError
from plait.parallel.shard import shard_tensor
from plait.sharding import Ownership

UNEVEN = load_preset("llama-tiny").model_copy(update={"vocab_size": 259, "mlp_width": 101, "num_layers": 1})
TIED = GptConfig(num_layers=1, width=16, num_heads=4, vocab_size=33, max_seq_len=8)
DEGREES = st.sampled_from([1, 2, 3, 4, 6])


def _build_full(ownership: dict[str, Ownership], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(owned.shape, generator=generator) for name, owned in ownership.items()}


def _cut(full: dict[str, torch.Tensor], ownership: dict[str, Ownership], rank: int) -> Tensors:
    return {name: build_owned(owned, shard_tensor(full[name], owned, rank), rank) for name, owned in ownership.items()}


def _save(folder: Path, parts: list[Tensors]) -> None:
    folder.mkdir()
    written = [save_part(folder, part, file_name(rank, len(parts))) for rank, part in enumerate(parts)]
    (folder / "index.json").write_text(build_index(1, {}, written).to_json())


def _load(folder: Path, ownership: dict[str, Ownership], degree: int) -> list[Tensors]:
    parts: list[Tensors] = []
    for rank in range(degree):
        part = {n: build_owned(o, torch.full(o.local_shape(rank), torch.nan), rank) for n, o in ownership.items()}
        index = Index.from_folder(folder)
        check_part(folder, index, part)
        load_part(folder, index, part)
        parts.append(part)
    return parts


@pytest.mark.parametrize("config", [UNEVEN, TIED], ids=["llama", "gpt"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=DEGREES, second=DEGREES, seed=st.integers(0, 99))
def test_resharding_there_and_back_is_bitwise(
    tmp_path_factory: pytest.TempPathFactory, config: object, first: int, second: int, seed: int
) -> None:
    """FIELD 3.35: reshard a -> b -> a bitwise, with uneven cuts, replicated KV heads (tp 6) and whole tensors."""
    folder = tmp_path_factory.mktemp("reshard")
    degrees = {degree: min(degree, 4) if config is TIED else degree for degree in (first, second)}
    at = {degree: derive_ownership(config, tp=used) for degree, used in degrees.items()}  # type: ignore[arg-type]
    full = _build_full(at[first], seed)
    _save(folder / "a", [_cut(full, at[first], rank) for rank in range(degrees[first])])
    _save(folder / "b", _load(folder / "a", at[second], degrees[second]))
    for rank, part in enumerate(_load(folder / "b", at[first], degrees[first])):
        for name, owned in part.items():
            assert torch.equal(owned.tensor, shard_tensor(full[name], at[first][name], rank)), name


def test_files_hold_every_element_once_at_true_sizes(tmp_path: Path) -> None:
    """FIELD 3.24 and 3.27: no padding for an uneven vocabulary, and tied weights once."""
    for config in (UNEVEN, TIED):
        ownership = derive_ownership(config, tp=4)
        full = _build_full(ownership, 0)
        folder = tmp_path / config.family
        _save(folder, [_cut(full, ownership, rank) for rank in range(4)])
        held = sum(_count_tensor_bytes(path) for path in folder.glob("*.safetensors"))
        assert held == 4 * config.num_parameters
    assert "head.weight" not in derive_ownership(TIED, tp=4)


def test_the_moments_need_not_be_read_to_read_the_model(tmp_path: Path) -> None:
    model = Ownership("model/w", (4,))
    moment = Ownership("optimizer/exp_avg/w", (4,))
    both = {owned.name: build_owned(owned, torch.arange(4.0)) for owned in (model, moment)}
    _save(tmp_path / "a", [both])
    (part,) = _load(tmp_path / "a", {"model/w": model}, 1)
    assert torch.equal(part["model/w"].tensor, torch.arange(4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_bit_of_every_dtype_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    ownership = Ownership("w", (3, 5))
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 5 * dtype.itemsize // 2), generator=torch.Generator().manual_seed(1))
    tensor = bits.to(torch.int16).view(dtype)
    _save(tmp_path / "a", [{"w": build_owned(ownership, tensor)}])
    target = {"w": build_owned(ownership, torch.zeros_like(tensor))}
    load_part(tmp_path / "a", Index.from_folder(tmp_path / "a"), target)
    assert torch.equal(target["w"].tensor.view(torch.int16), tensor.view(torch.int16))


def test_a_checkpoint_of_another_model_is_refused_with_its_differences(tmp_path: Path) -> None:
    saved = {"model/a": Ownership("model/a", (4, 2)), "model/b": Ownership("model/b", (3,))}
    _save(tmp_path / "a", [_cut(_build_full(saved, 0), saved, 0)])
    wanted = {"model/a": Ownership("model/a", (4, 3)), "model/c": Ownership("model/c", (3,))}
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path / "a", wanted, 1)
    assert caught.value.message.splitlines()[1:] == [
        "  - model/c is not in it",
        "  - model/b is in it, and the model has no such tensor",
        "  - model/a is [4, 2] in it, and [4, 3] in the model",
    ]
    assert caught.value.hint == "use the model config it was trained with"


def test_a_file_that_does_not_hold_what_the_index_says_is_refused(tmp_path: Path) -> None:
    """As long as it should be, but of another checkpoint."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        _save(tmp_path / name, [{name: build_owned(Ownership(name, (4,)), torch.full((4,), value))}])
    other = tmp_path / "b" / "tp-00000-of-00001.safetensors"
    other.replace(tmp_path / "a" / other.name)
    with pytest.raises(CheckpointError, match=r"does not hold what the index says: a"):
        _load(tmp_path / "a", {"a": Ownership("a", (4,))}, 1)


def test_a_file_with_a_broken_header_is_refused(tmp_path: Path) -> None:
    ownership = {"w": Ownership("w", (4,))}
    _save(tmp_path / "a", [_cut(_build_full(ownership, 0), ownership, 0)])
    path = tmp_path / "a" / "tp-00000-of-00001.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"tp-00000-of-00001.safetensors: cannot be read"):
        _load(tmp_path / "a", ownership, 1)


def _count_tensor_bytes(path: Path) -> int:
    raw = path.read_bytes()
    return len(raw) - 8 - int.from_bytes(raw[:8], "little")
