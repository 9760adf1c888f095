"""One rank turns text into tokens, the others wait for it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.data import DataConfig
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.train.corpus import tokenize
from tests.support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from tests.support.training import LLAMA, build_run

Ranks = Callable[[int], LocalRanks]

TIMEOUT_S = 3.0
"""How long a collective of `hasty_ranks` may wait."""


@pytest.fixture(scope="module")
def hasty_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        yield ranks


def _build_text_run(folder: Path, text: str) -> RunConfig:
    tokenizer = save_byte_tokenizer(folder)
    (folder / "a.txt").write_text(text)
    data = DataConfig(kind="text", paths=(str(folder / "a.txt"),), tokenizer=str(tokenizer))
    model = LLAMA.model_copy(update={"vocab_size": VOCAB_SIZE})
    return build_run(folder, model=model, parallel={"tp": 2}).model_copy(update={"data": data})


def _prepare(run: RunConfig, work_s: float = 0.0) -> tuple[bool, list[int]]:
    """Whether this rank wrote the tokens, and the first of them; the work is made to take `work_s`."""
    wrote = []
    write = tokenize._write_tokens

    def write_slowly(*arguments: Any) -> None:
        wrote.append(True)
        time.sleep(work_s)
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_write_tokens", write_slowly)
        patch.setattr(tokenize, "_ASK_EVERY_S", 0.2)
        stream = tokenize.prepare_tokens(run, build_mesh(run.parallel.mesh_shape))
    return bool(wrote), stream.read(0, 3).tolist()


def test_one_rank_works_and_all_read_the_same(ranks: Ranks, tmp_path: Path) -> None:
    run = _build_text_run(tmp_path, "some text")
    (first, second) = ranks(2).call(_prepare, run=run)
    assert (first[0], second[0]) == (True, False)
    assert first[1] == second[1]
    assert [wrote for wrote, _ in ranks(2).call(_prepare, run=run)] == [False, False]


def test_the_work_may_take_longer_than_a_collective_may_wait(hasty_ranks: LocalRanks, tmp_path: Path) -> None:
    run = _build_text_run(tmp_path, "some text")
    results = hasty_ranks.call(_prepare, run=run, work_s=1.5 * TIMEOUT_S)
    assert [wrote for wrote, _ in results] == [True, False]


def test_text_that_cannot_be_read_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run = _build_text_run(tmp_path, "some text")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a.txt: is not UTF-8 text \(byte 0 is 0xff\)"):
        ranks(2).call(_prepare, run=run)
