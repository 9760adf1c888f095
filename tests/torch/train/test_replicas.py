"""The hash by which replicas are compared."""

import pytest
import torch

from plait.train import replicas

TABLE = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hash_does_not_depend_on_how_much_is_hashed_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole = replicas._hash(TABLE.to(dtype))
    for size in (1, 4, 35):
        monkeypatch.setattr(replicas, "_HASHED_AT_ONCE", size)
        assert replicas._hash(TABLE.to(dtype)) == whole


def test_elements_that_change_places_change_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_HASHED_AT_ONCE", 7)
    assert replicas._hash(TABLE) != replicas._hash(TABLE.flip(0))


def test_a_rank_without_a_row_has_a_hash() -> None:
    """Adapters of few rows over many ranks of dp_shard: the last ones have none."""
    assert replicas._hash(TABLE[:0]) == 0
