"""Published rows with fields dropped, moved or turned to junk: each is answered or refused with a reason."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.planner.score.report import score_rows
from plait.planner.score.row import parse_row
from tests.support.hardware import list_rows

_ROWS = list(list_rows(""))

_KINDS = sorted({row["kind"] for row in _ROWS})
_ROWS_OF_KINDS = [[row for row in _ROWS if row["kind"] == kind] for kind in _KINDS]

_REQUIRED = ("id", "source", "kind", "value", "unit")

_JUNK = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 3, 7, 8, 64, 1024, 4096, 2**40, 0.5, 1e300])
    | st.floats()
    | st.text(max_size=8)
    | st.builds(list)
    | st.builds(dict, a=st.just(1))
    | st.sampled_from([" ", "8", "fp8", "H100", "B200", "cpu", "gelu", "swiglu", "ms", "full"])
)


@st.composite
def odd_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A published row, some of its fields dropped or replaced."""
    record = json.loads(json.dumps(draw(st.sampled_from(draw(st.sampled_from(_ROWS_OF_KINDS))))))
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from([record, *(each for each in record.values() if isinstance(each, dict))]))
        names = sorted(name for name in table if table is not record or name not in ("id", "source", "value"))
        if not names:
            continue
        name = draw(st.sampled_from(names))
        if draw(st.booleans()) and not (table is record and name in _REQUIRED):
            del table[name]
        else:
            value = draw(_JUNK)
            table[name] = "x" if table is record and name in _REQUIRED and value is None else value
    return record


@given(odd_rows())
def test_no_change_of_a_published_row_is_an_exception(record: dict[str, Any]) -> None:
    (scored,) = score_rows([parse_row(record)]).rows
    assert scored.covered != bool(scored.reason)
    json.dumps(score_rows([parse_row(record)]).to_json(), allow_nan=False)


_NAMED_BY_ID = ("overlap_speedup", "overlap_kernel_time")
"""Rows of figures say `AG+GEMM` nowhere else."""


@given(
    st.sampled_from([row for row in _ROWS if row["kind"] not in _NAMED_BY_ID]),
    st.text("abcdefghijk-_0123456789", min_size=1, max_size=20),
)
def test_whether_a_row_is_covered_does_not_hang_on_its_id(record: dict[str, Any], name: str) -> None:
    (before,), (after,) = (score_rows([parse_row(each)]).rows for each in (record, {**record, "id": name}))
    assert (before.covered, before.predicted, before.reason) == (after.covered, after.predicted, after.reason)
