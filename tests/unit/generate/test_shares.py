"""Who is read in a step: nobody starves, short prompts do not wait for long ones, the budget is used."""

from hypothesis import given
from hypothesis import strategies as st

from plait.generate.shares import share_budget

lengths = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


@given(lengths, st.integers(1, 1024))
def test_the_budget_is_used_up_and_no_more(unread: list[int], budget: int) -> None:
    shares = share_budget(unread, budget)
    assert all(0 <= share <= length for share, length in zip(shares, unread, strict=True))
    assert sum(shares) == min(budget, sum(unread))


@given(lengths, st.integers(2, 1024))
def test_the_oldest_prompt_is_always_read_on(unread: list[int], budget: int) -> None:
    assert share_budget(unread, budget)[0] >= min(unread[0], budget // 2)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    assert share_budget([8000, 3000, 20, 500], 512) == [256, 0, 20, 236]


def test_what_others_leave_is_the_oldest_ones() -> None:
    assert share_budget([8000, 20], 512) == [492, 20]


def test_there_is_nothing_to_share_without_prompts() -> None:
    assert share_budget([], 512) == []
