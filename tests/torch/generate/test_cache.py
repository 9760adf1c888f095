"""Storage of keys and values: what is put in comes out, for the right row, wherever rows have moved."""

import torch

from plait.generate.cache import KVCache, PackedAccess, Piece, RowsAccess
from plait.generate.masks import MaskForm

HEADS, WIDTH = 3, 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 99, shape).float()


def test_pieces_of_prompts_are_stored_and_seen_with_what_was_before_them() -> None:
    cache = KVCache(65_536)
    first, second = draw(1, HEADS, 7, WIDTH), draw(1, HEADS, 5, WIDTH)
    cache.reserve(2, 6)
    pieces = [Piece(0, 0, 4), Piece(1, 0, 3)]
    keys, values = PackedAccess(cache, pieces).update(first, -first, 0)
    torch.testing.assert_close(keys, first)
    torch.testing.assert_close(values, -first)
    again = [Piece(1, 3, 6), Piece(0, 4, 6)]
    keys, _ = PackedAccess(cache, again).update(second, second, 0)
    expected = torch.cat([first[:, :, 4:], second[:, :, :3], first[:, :, :4], second[:, :, 3:]], 2)
    torch.testing.assert_close(keys, expected)


def test_new_tokens_go_to_the_end_of_rows_of_different_lengths() -> None:
    cache = KVCache(65_536)
    cache.reserve(2, 4)
    prompts = draw(1, HEADS, 4, WIDTH)
    PackedAccess(cache, [Piece(0, 0, 1), Piece(1, 0, 3)]).update(prompts, prompts, 5)
    new = draw(2, HEADS, 1, WIDTH)
    access = RowsAccess(cache, torch.tensor([1, 3]), 4)
    keys, values = access.update(new, new, 5)
    assert keys.shape == values.shape == (2, HEADS, 4, WIDTH)
    torch.testing.assert_close(keys[0, :, :2], torch.cat([prompts[0, :, :1], new[0]], 1))
    torch.testing.assert_close(keys[1], torch.cat([prompts[0, :, 1:], new[1]], 1))
    assert (access.get_seq_length(), access.get_mask_sizes(1, 0)) == (4, (4, 0))


def test_what_is_stored_survives_growth_and_moves() -> None:
    cache = KVCache(65_536)
    cache.reserve(2, 100)
    stored = draw(1, HEADS, 150, WIDTH)
    PackedAccess(cache, [Piece(0, 0, 100), Piece(1, 0, 50)]).update(stored, -stored, 0)
    cache.reserve(9, 200)
    assert (cache.num_rows, cache.length) == (12, 256)
    cache.swap(0, 1, 100)
    cache.move(1, 8, 100)
    keys, values = cache.layers[0]
    torch.testing.assert_close(keys[0, :, :50], stored[0, :, 100:])
    torch.testing.assert_close(values[8, :, :100], -stored[0, :, :100])


def test_growth_in_one_direction_gives_back_the_other() -> None:
    cache = KVCache(65_536)
    cache.reserve(1, 1000)
    one = draw(1, HEADS, 2, WIDTH)
    PackedAccess(cache, [Piece(0, 0, 2)]).update(one, one, 0)
    cache.reserve(20, 10)
    assert (cache.num_rows, cache.length) == (20, 128)
    torch.testing.assert_close(cache.layers[0][0][0, :, :2], one[0])
    assert cache.bytes_per_token == 2 * HEADS * WIDTH * 4
    assert cache.num_bytes == 20 * 128 * cache.bytes_per_token
    cache.clear()
    assert cache.num_bytes == 0


def test_masks_are_of_the_form_that_the_attention_takes() -> None:
    distance = torch.arange(3)[:, None] - torch.arange(3)
    is_visible, distance = (distance >= 0)[None], distance[None]
    full, sliding = (
        MaskForm({"full": None, "sliding": 2}, is_additive=False).build(is_visible, distance, torch.float32).values()
    )  # type: ignore[union-attr]
    assert full.tolist() == [[[[True, False, False], [True, True, False], [True, True, True]]]]
    assert sliding[0, 0, 2].tolist() == [False, True, True]
    added = MaskForm({"full": None}, is_additive=True).build(is_visible, distance, torch.float32)
    assert isinstance(added, torch.Tensor)
    assert added[0, 0, 1].tolist() == [0.0, 0.0, torch.finfo(torch.float32).min]
