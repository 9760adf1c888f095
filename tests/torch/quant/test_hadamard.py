"""The Hadamard transform: orthonormal, exact where it can be, and the same bits whatever lies beside."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import ShardingError
from plait.quant.hadamard import mix

SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 3 + [-1.0] * 4)


def draw_integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def build_matrix() -> Tensor:
    """Sylvester's: every second doubling of it changes sign."""
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / 4


def test_sixteens_of_rows_are_multiplied_by_the_matrix() -> None:
    x = draw_integers(48, 5)
    expected = build_matrix() @ (x.view(3, 16, 5) * SIGNS.view(16, 1))
    assert torch.equal(mix(x, SIGNS), expected.view(48, 5))


def test_the_transform_is_orthonormal() -> None:
    matrix = mix(torch.eye(16), SIGNS)
    assert torch.equal(matrix.T @ matrix, torch.eye(16))
    assert (matrix.abs() == 0.25).all()


@given(seed=st.integers(0, 1000), sixteens=st.integers(0, 4))
def test_products_over_rows_stay_what_they_are(seed: int, sixteens: int) -> None:
    x, y = draw_integers(16 * sixteens, 6, seed=seed), draw_integers(16 * sixteens, 4, seed=seed + 1)
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
    # Quarters of sums of integers: exact.
    assert torch.equal(mix(x, signs).double().T @ mix(y, signs).double(), x.double().T @ y.double())


def test_an_outlier_is_spread_over_its_sixteen() -> None:
    x = torch.zeros(32, 1)
    x[3] = 16.0
    mixed = mix(x, SIGNS)
    assert (mixed[:16].abs() == 4.0).all()
    assert not mixed[16:].any()


def test_a_part_has_the_bits_of_the_whole() -> None:
    x = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    whole = mix(x, SIGNS)
    for rows, columns in (
        (slice(0, 16), slice(0, 1)),
        (slice(32, 112), slice(3, 80)),
        (slice(240, 256), slice(191, 192)),
    ):
        assert torch.equal(mix(x[rows, columns].contiguous(), SIGNS), whole[rows, columns])


def test_nothing_is_mixed_to_nothing() -> None:
    assert mix(torch.empty(0, 7), SIGNS).shape == (0, 7)
    assert mix(torch.empty(16, 0), SIGNS).shape == (16, 0)


def test_the_matrix_given_is_left_alone() -> None:
    x = draw_integers(16, 3)
    before = x.clone()
    mix(x, SIGNS)
    assert torch.equal(x, before)


def test_torn_sixteens_are_refused() -> None:
    with pytest.raises(ShardingError, match="40 tokens are no whole 16s") as error:
        mix(torch.zeros(40, 3), SIGNS)
    assert error.value.hint == "make batch times sequence a multiple of 16, or set quantization.hadamard = false"
