"""Buffers come back only when they were given back, and shapes that come no more do not stay for ever."""

import torch

from plait.overlap.transport.pool import Pool

CPU = torch.device("cpu")


def take(pool: Pool, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.take(num_rows, 8, dtype, CPU)


def test_a_buffer_is_used_again_only_when_it_was_given_back_and_for_the_same_shape_and_dtype():
    pool = Pool()
    first, second = take(pool, 4), take(pool, 4)
    assert first.data_ptr() != second.data_ptr()
    pool.give_back(first)
    assert take(pool, 3) is not first
    assert take(pool, 4, torch.float64) is not first
    assert take(pool, 4) is first
    assert take(pool, 4) is not first


def test_what_lies_idle_is_bounded_by_what_was_in_use_at_once_and_the_oldest_goes_first():
    pool = Pool()
    for num_rows in range(1, 9):
        pool.give_back(take(pool, num_rows))
    kept = [num_rows for num_rows in range(1, 9) if (8 * 4 * num_rows, num_rows) in idle(pool)]
    assert kept == [7, 8]


def idle(pool: Pool) -> set[tuple[int, int]]:
    return {(buffer.nbytes, buffer.shape[0]) for buffers in pool._idle.values() for buffer in buffers}
