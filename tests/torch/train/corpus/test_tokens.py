from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.train.corpus.tokens import TokenStream, TokenWriter


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6), st.data())
def test_any_range_is_read_across_shards(shards: list[list[int]], data: st.DataObject) -> None:
    stream = TokenStream([np.array(shard, np.uint16) for shard in shards])
    whole = [token for shard in shards for token in shard]
    assert len(stream) == len(whole)
    stop = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, stop))
    assert stream.read(start, stop).tolist() == whole[start:stop]


def test_the_fingerprint_changes_with_length_and_content() -> None:
    streams = [np.arange(size) + shift for size in (0, 1, 63, 64, 5000) for shift in (0, 1)]
    assert len({TokenStream([stream]).fingerprint() for stream in streams}) == 9  # an empty one has no content
    assert TokenStream([np.arange(5000)]).fingerprint() == TokenStream([np.arange(9), np.arange(9, 5000)]).fingerprint()


@pytest.mark.parametrize(("vocab_size", "width_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_a_written_file_is_mapped_with_the_narrowest_integers(
    tmp_path: Path, vocab_size: int, width_bytes: int
) -> None:
    path = tmp_path / "tokens.npy"
    with TokenWriter(path, vocab_size) as writer:
        for part in ([1, vocab_size - 1], [], [3] * 1000):
            writer.append(part)
    stream = TokenStream.from_files([path])
    assert stream.read(0, 1002).tolist() == [1, vocab_size - 1, *[3] * 1000]
    assert stream.find_outside(vocab_size) is None
    assert stream.find_outside(vocab_size - 1) == vocab_size - 1
    assert path.stat().st_size == 128 + 1002 * width_bytes


def test_a_negative_token_is_outside_any_vocabulary() -> None:
    assert TokenStream([np.array([3, 1]), np.array([0, -1, 2])]).find_outside(300) == -1


def test_two_runs_may_write_the_same_tokens_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with TokenWriter(path, 9) as first, TokenWriter(path, 9) as second:
        for token in range(5):
            first.append([token])
            second.append([token])
    assert TokenStream.from_files([path]).read(0, 5).tolist() == list(range(5))
    assert list(tmp_path.iterdir()) == [path]


def test_raw_shards_are_read_with_and_without_the_header_of_llm_c(tmp_path: Path) -> None:
    tokens = np.arange(300, dtype="<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "raw.bin").write_bytes(tokens.tobytes())
    (tmp_path / "headed.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("raw.bin", "headed.bin"):
        assert TokenStream.from_files([tmp_path / name]).read(0, 300).tolist() == tokens.tolist()


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 300
    (tmp_path / "headed.bin").write_bytes(header.tobytes() + bytes(100))
    (tmp_path / "raw.bin").write_bytes(b"123")
    np.save(tmp_path / "array.npy", np.arange(1000))
    whole = (tmp_path / "array.npy").read_bytes()
    (tmp_path / "array.npy").write_bytes(whole[:500])
    for name, message in (
        ("headed.bin", "1124 bytes where the header says 300 tokens"),
        ("raw.bin", "3 bytes are not whole uint16"),
        ("array.npy", "array.npy: is not a token file"),
    ):
        with pytest.raises(ConfigError, match=message):
            TokenStream.from_files([tmp_path / name])


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int32), np.zeros(4, np.float32)])
def test_an_array_that_is_not_tokens_is_refused(tmp_path: Path, array: "np.ndarray[tuple[int, ...], np.dtype]") -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=f"a.npy: is not a token file .it is {array.dtype}"):
        TokenStream.from_files([tmp_path / "a.npy"])
