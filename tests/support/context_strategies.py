"""Hypothesis strategies for orders of tokens, masks, and what ranks need of each other."""

from hypothesis import strategies as st

from plait.contract.context.attention import ContextPlan
from plait.contract.context.mask import AttentionMask, build_documents
from plait.contract.context.needs import Needs
from plait.sharding.token_order import Order, TokenOrder, build_order

MAX_SIZE, MAX_DEGREE, MAX_BATCH = 30, 6, 3


def orders(*, max_size: int = MAX_SIZE) -> st.SearchStrategy[TokenOrder]:
    """Either order of any number of tokens, of fewer than ranks and none included."""
    return st.builds(build_order, st.sampled_from(Order), st.integers(0, max_size), st.integers(1, MAX_DEGREE))


@st.composite
def masks(draw: st.DrawFn, batch: int, size: int) -> AttentionMask:
    """Any mask for `batch` rows of `size` tokens: documents of any lengths, with padding behind them, or none."""
    rows = []
    for _ in range(draw(st.sampled_from([0, 1, batch]))):
        edges = draw(st.lists(st.integers(0, size), max_size=5).map(sorted))
        rows.append([stop - start for start, stop in zip([0, *edges], edges, strict=False)])
    window = draw(st.none() | st.integers(1, size + 2))
    return AttentionMask(draw(st.booleans()), window, build_documents(rows))


@st.composite
def plans(draw: st.DrawFn) -> ContextPlan:
    """Any order and any mask."""
    order, batch = draw(orders()), draw(st.integers(1, MAX_BATCH))
    return ContextPlan(order, draw(masks(batch, order.size)), batch)


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    """Any table, whether a mask gives it or not."""
    degree = draw(st.integers(1, MAX_DEGREE))
    row = st.lists(st.booleans(), min_size=degree, max_size=degree).map(tuple)
    return Needs(tuple(draw(st.lists(row, min_size=degree, max_size=degree))))
