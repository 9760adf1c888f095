import json

import pytest
import torch

from plait.checkpoint.shards import SINGLE_FILE, build_weight_index, parse_file_bytes, plan_files
from plait.checkpoint.spec import TensorSpec
from plait.errors import ConfigError


def _specs(*sizes: int) -> dict[str, TensorSpec]:
    return {f"t{number}": TensorSpec(torch.uint8, (size,)) for number, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), [[]]),
        ((4, 6), [["t0", "t1"]]),
        ((4, 6, 1), [["t0", "t1"], ["t2"]]),
        ((11, 1), [["t0"], ["t1"]]),
        ((4, 11, 4, 4), [["t1"], ["t0", "t2"], ["t3"]]),
        ((11, 12), [["t0"], ["t1"]]),
    ],
)
def test_files_are_filled_in_order_and_a_large_tensor_has_its_own(sizes: tuple[int, ...], expected: object) -> None:
    assert list(plan_files(_specs(*sizes), 10).values()) == expected


def test_the_files_are_those_of_the_hub_library() -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = [3, 17, 5, 8, 2, 12, 1, 9, 4, 30, 6, 6, 6]
    tensors = {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=15)
    assert plan_files(_specs(*sizes), 15) == split.filename_to_tensors


def test_one_file_has_no_number_and_several_are_counted() -> None:
    assert list(plan_files(_specs(4, 6), 10)) == [SINGLE_FILE]
    assert list(plan_files(_specs(4, 7), 10)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_the_index_says_where_each_tensor_is_and_how_much_there_is_of_all() -> None:
    specs = _specs(4, 7)
    index = json.loads(build_weight_index(plan_files(specs, 10), specs))
    assert index["weight_map"] == {
        "t0": "model-00001-of-00002.safetensors",
        "t1": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"] == {"total_parameters": 11, "total_size": 11}


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("1.5KB", 1500), ("7", 7)]
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_file_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size of a file"):
        parse_file_bytes(text)
