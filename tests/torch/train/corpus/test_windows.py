import numpy as np
import pytest
import torch

from plait.config.parallel import ParallelConfig
from plait.config.presets import load_preset
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.errors import ConfigError
from plait.train.corpus.tokens import TokenStream
from plait.train.corpus.windows import IGNORE_INDEX, MicroBatch, Windows, read_micro_batches

SEQ_LEN = 4
STREAM = TokenStream([np.arange(50), np.arange(50, 99)])


def _run(dp: int, micro_batch_size: int, gradient_accumulation: int) -> RunConfig:
    train = TrainConfig(seq_len=SEQ_LEN, micro_batch_size=micro_batch_size, gradient_accumulation=gradient_accumulation)
    return RunConfig(model=load_preset("llama-tiny"), parallel=ParallelConfig(dp_replicate=dp), train=train)


def _read_step(run: RunConfig, consumed: int = 0) -> list[MicroBatch]:
    windows = Windows(STREAM, SEQ_LEN, seed=3)
    ranks = range(run.parallel.dp)
    return [batch for rank in ranks for batch in read_micro_batches(windows, run, consumed, rank)]


def test_targets_are_the_tokens_one_later() -> None:
    for batch in _read_step(_run(2, 3, 2)):
        assert batch.tokens.shape == (3, SEQ_LEN)
        assert torch.equal(batch.targets, batch.tokens.flatten() + 1)


def test_an_epoch_trains_on_every_whole_window_once_and_the_next_in_another_order() -> None:
    windows = Windows(STREAM, SEQ_LEN, seed=3)
    assert windows.num_windows == 24
    epochs = [[int(windows.read(epoch * 24 + i)[0]) for i in range(24)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 96, 4))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("dp", "micro_batch_size", "accumulation"), [(1, 12, 1), (2, 3, 2), (3, 1, 4), (12, 1, 1)])
def test_a_step_takes_the_same_sequences_however_they_are_spread(
    dp: int, micro_batch_size: int, accumulation: int
) -> None:
    """So the loss curve does not depend on the dp degree, and a run resumes exactly at another one."""
    batches = _read_step(_run(dp, micro_batch_size, accumulation), consumed=12)
    rows = {batch.first_token // SEQ_LEN + i: row.tolist() for batch in batches for i, row in enumerate(batch.tokens)}
    windows = Windows(STREAM, SEQ_LEN, seed=3)
    assert rows == {sequence: windows.read(sequence)[:-1].tolist() for sequence in range(12, 24)}


def test_a_corpus_shorter_than_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the corpus has 4 tokens, and one sequence needs 5"):
        Windows(TokenStream([np.arange(4)]), SEQ_LEN, seed=0)
    assert Windows(TokenStream([np.arange(5)]), SEQ_LEN, seed=0).num_windows == 1


def test_documents_end_with_their_last_token_and_predict_nothing_of_the_next() -> None:
    end = 9
    windows = Windows(TokenStream([np.array([1, 2, end, 3, end, end, 6, 7, 8])]), SEQ_LEN, seed=0, end_of_text=end)
    (batch,) = read_micro_batches(windows, _run(1, 2, 1), 0, 0)
    rows = zip(batch.tokens.tolist(), batch.documents, batch.targets.view(2, SEQ_LEN).tolist(), strict=True)
    found = {tokens[0]: ([(each.start, each.stop) for each in own], targets) for tokens, own, targets in rows}
    assert found[1] == ([(0, 3), (3, 4)], [2, end, IGNORE_INDEX, end])
    assert found[end] == ([(0, 1), (1, 2), (2, 4)], [IGNORE_INDEX, IGNORE_INDEX, 7, 8])


def test_without_an_end_of_documents_a_sequence_is_one() -> None:
    assert all(batch.documents == () for batch in _read_step(_run(1, 2, 1)))
