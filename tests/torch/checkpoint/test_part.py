"""One rank after another writes and reads its part, without a process group: any degrees, every kind of ownership."""

import pickle
import sys
from io import BytesIO
from math import prod
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.checkpoint.index import Index, sum_file
from plait.checkpoint.names import list_checkpoints, part_name
from plait.checkpoint.part import Owned, Tensors, build_owned, build_state_item, build_write_item
from plait.checkpoint.read import Checkpoint, check_fits
from plait.checkpoint.save import Save
from plait.checkpoint.write import Part, write_part
from plait.config.model import GptConfig
from plait.config.presets import load_preset
from plait.contract.model import derive_ownership
from plait.errors import CheckpointError
from plait.parallel.shard import shard_tensor
from plait.sharding import Interval, Ownership, Split, build_split
from tests.support.strategies import splits

UNEVEN = load_preset("llama-tiny").model_copy(update={"vocab_size": 259, "mlp_width": 101, "num_layers": 1})
TIED = GptConfig(num_layers=1, width=16, num_heads=4, vocab_size=33, max_seq_len=8)
DEGREES = st.sampled_from([1, 2, 3, 4, 6])


def _build_full(ownership: dict[str, Ownership], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(owned.shape, generator=generator) for name, owned in ownership.items()}


def _cut(full: dict[str, torch.Tensor], ownership: dict[str, Ownership], rank: int) -> Tensors:
    return {name: build_owned(owned, shard_tensor(full[name], owned, rank), rank) for name, owned in ownership.items()}


def _save(folder: Path, parts: list[Tensors], state: dict[str, object] | None = None) -> Path:
    """The checkpoint of as many ranks as there are parts."""
    save = Save(folder, 1, state or {})
    save.begin()
    for rank, part in enumerate(parts):
        save.write(part, rank)
    save.publish(len(parts))
    return save.final


def _load(folder: Path, ownership: dict[str, Ownership], degree: int) -> list[Tensors]:
    parts: list[Tensors] = []
    for rank in range(degree):
        part = {n: build_owned(o, torch.full(o.local_shape(rank), torch.nan), rank) for n, o in ownership.items()}
        checkpoint = Checkpoint.from_folder(folder)
        check_fits(checkpoint, {name: owned.shape for name, owned in part.items()})
        checkpoint.read_into(part)
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
    saved = _save(folder / "a", [_cut(full, at[first], rank) for rank in range(degrees[first])])
    saved = _save(folder / "b", _load(saved, at[second], degrees[second]))
    for rank, part in enumerate(_load(saved, at[first], degrees[first])):
        for name, owned in part.items():
            assert torch.equal(owned.tensor, shard_tensor(full[name], at[first][name], rank)), name


def test_files_hold_every_element_once_at_true_sizes(tmp_path: Path) -> None:
    """FIELD 3.24 and 3.27: no padding for an uneven vocabulary, and tied weights once."""
    for config in (UNEVEN, TIED):
        ownership = derive_ownership(config, tp=4)
        full = _build_full(ownership, 0)
        saved = _save(tmp_path / config.family, [_cut(full, ownership, rank) for rank in range(4)])
        held = [torch.load(file, weights_only=True) for file in _list_pieces(saved)]
        assert sum(tensor.numel() for tensor in held) == config.num_parameters
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held)
    assert "head.weight" not in derive_ownership(TIED, tp=4)


def _list_pieces(saved: Path) -> list[BytesIO]:
    """What is in the files, by what torch's metadata says of them; they hold nothing else."""
    with (saved / ".metadata").open("rb") as file:
        storage = pickle.load(file).storage_data
    files = {path.name: path.read_bytes() for path in saved.glob("*.distcp")}
    assert sum(each.length for each in storage.values()) == sum(map(len, files.values()))
    return [
        BytesIO(files[each.relative_path][each.offset : each.offset + each.length])
        for index, each in storage.items()
        if index.fqn != "state"
    ]


def test_the_moments_need_not_be_read_to_read_the_model(tmp_path: Path) -> None:
    model = Ownership("model.w", (4,))
    moment = Ownership("optimizer.exp_avg.w", (4,))
    both = {owned.name: build_owned(owned, torch.arange(4.0)) for owned in (model, moment)}
    (part,) = _load(_save(tmp_path, [both]), {"model.w": model}, 1)
    assert torch.equal(part["model.w"].tensor, torch.arange(4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_bit_of_every_dtype_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    ownership = Ownership("w", (3, 5))
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 5 * dtype.itemsize // 2), generator=torch.Generator().manual_seed(1))
    tensor = bits.to(torch.int16).view(dtype)
    saved = _save(tmp_path, [{"w": build_owned(ownership, tensor)}])
    target = {"w": build_owned(ownership, torch.zeros_like(tensor))}
    Checkpoint.from_folder(saved).read_into(target)
    assert torch.equal(target["w"].tensor.view(torch.int16), tensor.view(torch.int16))


def test_a_view_is_written_and_filled_alone(tmp_path: Path) -> None:
    """Columns of a larger tensor, and a transposed one: neither what is beside them nor their order gets lost."""
    around = torch.arange(40.0).view(5, 8)
    views = {"columns": around[:, 2:5], "turned": around[:4].t()}
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    saved = _save(tmp_path, [{n: build_owned(Ownership(n, shapes[n]), view) for n, view in views.items()}])
    target = torch.zeros(5, 8)
    Checkpoint.from_folder(saved).read_piece(target[:, 2:5], "columns", (Interval(0, 5), Interval(0, 3)))
    assert torch.equal(target[:, 2:5], around[:, 2:5])
    assert not target[:, :2].any()
    assert not target[:, 5:].any()
    turned = torch.zeros(4, 8)
    Checkpoint.from_folder(saved).read_piece(turned.t(), "turned", (Interval(0, 8), Interval(0, 4)))
    assert torch.equal(turned, around[:4])


@settings(deadline=None)
@given(rows=splits().filter(lambda split: split.size > 0), seed=st.integers(0, 9))
def test_pieces_of_any_cut_are_read_as_any_other(
    tmp_path_factory: pytest.TempPathFactory, rows: Split, seed: int
) -> None:
    """Two dims cut at once, as FSDP cuts what tp has cut; ranks with nothing, and ranks that hold the same."""
    full = torch.randn(rows.size, 6, generator=torch.Generator().manual_seed(seed))
    parts: list[Tensors] = []
    for column in build_split(6, 1 + seed % 3).intervals:
        for rank, row in enumerate(rows.intervals):
            piece = full[row.start : row.stop, column.start : column.stop]
            parts.append({"w": Owned(tuple(full.shape), (row, column), piece, rank == rows.replicas(rank)[0])})
    checkpoint = Checkpoint.from_folder(_save(tmp_path_factory.mktemp("cut"), parts))
    assert sum(prod(map(len, piece)) for piece in checkpoint.list_pieces("w")) == full.numel()
    start = rows.size // 3
    target = torch.full((rows.size - start, 4), torch.nan)
    checkpoint.read_piece(target, "w", (Interval(start, rows.size), Interval(1, 5)))
    assert torch.equal(target, full[start:, 1:5])


@pytest.mark.parametrize("written", [(0, 2), (0,)], ids=["twice", "never"])
def test_what_two_ranks_write_or_none_does_is_no_checkpoint(tmp_path: Path, written: tuple[int, ...]) -> None:
    pieces = [(Interval(0, 2),), (Interval(2, 4),), (Interval(1, 4),)]
    parts: list[Tensors] = [
        {"w": Owned((4,), piece, torch.ones(len(piece[0])), at in written)} for at, piece in enumerate(pieces)
    ]
    with pytest.raises(CheckpointError, match="the ranks do not write every tensor once"):
        _save(tmp_path, parts)
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_of_another_model_is_refused_with_its_differences(tmp_path: Path) -> None:
    saved = {"model.a": Ownership("model.a", (4, 2)), "model.b": Ownership("model.b", (3,))}
    folder = _save(tmp_path, [_cut(_build_full(saved, 0), saved, 0)])
    wanted = {"model.a": Ownership("model.a", (4, 3)), "model.c": Ownership("model.c", (3,))}
    with pytest.raises(CheckpointError) as caught:
        _load(folder, wanted, 1)
    assert caught.value.message.splitlines()[1:] == [
        "  - model.c is not in it",
        "  - model.b is in it, and the model has no such tensor",
        "  - model.a is [4, 2] in it, and [4, 3] in the model",
    ]
    assert caught.value.hint == "use the model config it was trained with"


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    """As long as it should be, and undamaged."""
    ownership = Ownership("w", (4,))
    saved = [_save(tmp_path / str(v), [{"w": build_owned(ownership, torch.full((4,), v))}]) for v in (1.0, 2.0)]
    (saved[1] / "__0_0.distcp").replace(saved[0] / "__0_0.distcp")
    checkpoint = Checkpoint.from_folder(saved[0])
    with pytest.raises(CheckpointError, match="is damaged: __0_0.distcp does not hold what was written"):
        checkpoint.index.check_files(saved[0], checkpoint.index.files)


class _Harm:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (Path("harmed"),))


def test_metadata_from_elsewhere_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index fits, as whoever made the one makes the other."""
    monkeypatch.chdir(tmp_path)
    saved = _save(tmp_path, [{"w": build_owned(Ownership("w", (4,)), torch.ones(4))}])
    (saved / ".metadata").write_bytes(pickle.dumps(_Harm()))
    files = {path.name: sum_file(path) for path in saved.iterdir() if path.name != "index.json"}
    (saved / "index.json").write_text(Index(1, {}, files).to_json())
    with pytest.raises(CheckpointError, match=r".metadata: cannot be read .*which is no part of metadata"):
        Checkpoint.from_folder(saved)
    assert not (tmp_path / "harmed").exists()


def test_a_note_tells_all_of_what_was_written_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [build_state_item(), build_write_item("w", (3, 4), (Interval(1, 3), Interval(0, 4)), torch.bfloat16)]
    held = {"state": {"seed": 5}, "w": torch.ones(2, 4, dtype=torch.bfloat16)}
    part = write_part(tmp_path, "file", items, lambda item: held[item.index.fqn])
    assert Part.from_json(part.to_json()) == part
    monkeypatch.chdir(tmp_path)
    save = Save(tmp_path, 1, {})
    save.begin()
    (save.writing / part_name(0)).write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(ValueError, match="codec can't decode|Expecting value"):
        save.publish(1)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["PosixPath", "WindowsPath"])
def test_metadata_of_another_python_and_another_system_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, kind: str
) -> None:
    """Python 3.13 has its paths in a module of their own; no system makes the paths of another."""
    saved = _save(tmp_path, [{"w": build_owned(Ownership("w", (4,)), torch.ones(4))}])
    with (saved / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    there = ModuleType(module)
    foreign = type(kind, (PurePosixPath,), {"__module__": module})
    setattr(there, kind, foreign)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, there)
        metadata.storage_meta.checkpoint_id = foreign("elsewhere")
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    files = {path.name: sum_file(path) for path in saved.iterdir() if path.name != "index.json"}
    (saved / "index.json").write_text(Index(1, {}, files).to_json())
    target = {"w": build_owned(Ownership("w", (4,)), torch.zeros(4))}
    Checkpoint.from_folder(saved).read_into(target)
    assert target["w"].tensor.tolist() == [1.0] * 4
