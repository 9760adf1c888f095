from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.spec import DTYPE_NAMES, TensorSpec, sort_names
from plait.checkpoint.stream import TensorWriter
from plait.errors import CheckpointError
from tests.support.file_limit import limited


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> int:
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, specs, metadata) as writer:
        for name in sort_names(specs):
            writer.write(name, tensors[name])
    return writer.size_bytes


TENSORS = {
    "b": torch.arange(12.0).view(3, 4),
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
    "ids": torch.arange(5),
    "flags": torch.tensor([True, False]),
    "z.weight": torch.arange(3, dtype=torch.float16),
    "Z.weight": torch.arange(3, dtype=torch.float64),
    "turned": torch.arange(12.0).view(3, 4).t(),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_that_the_library_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    size_bytes = _write(tmp_path / "ours", TENSORS, metadata)
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert size_bytes == (tmp_path / "ours").stat().st_size


def test_every_dtype_is_ordered_as_the_library_orders_it(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.zeros(2, dtype=dtype) for number, dtype in enumerate(DTYPE_NAMES)}
    _write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "file", TENSORS)
    read = load_file(tmp_path / "file")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with limited(1 << 12), pytest.raises(CheckpointError, match=r"file: cannot be written \(File too large\)"):
        _write(tmp_path / "file", {"a": torch.zeros(1 << 16)})


def test_a_file_that_was_not_given_all_its_tensors_is_a_bug(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="b were not written"),
        TensorWriter(tmp_path / "file", {name: TensorSpec(torch.float32, (1,)) for name in "ab"}) as writer,
    ):
        writer.write("a", torch.zeros(1))
