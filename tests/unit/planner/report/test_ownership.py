import re
from collections import Counter

import pytest

from plait.planner.plan_config import PlanConfig
from plait.planner.report.ownership import draw_all, draw_legend, list_activations, list_weights
from tests.support.planned_report import predict_one

PART = re.compile(
    r'<rect class="part" data-ranks="([\d ]+)" data-words="([^"]*)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" '
    r'height="([\d.]+)"'
)


def _find(name: str, tp: int) -> str:
    drawn = [each for each in list_weights(predict_one(PlanConfig(tp=tp))) if each.name == name]
    assert len(drawn) == 1
    return draw_all(drawn, tp)


def _areas(drawing: str) -> list[float]:
    return [float(width) * float(height) for *_, width, height in PART.findall(drawing)]


def test_even_parts_are_of_one_size_and_cover_the_weight() -> None:
    parts = PART.findall(_find("mlp.w_gate.weight", 4))
    assert [ranks for ranks, *_ in parts] == ["0", "1", "2", "3"]
    areas = _areas(_find("mlp.w_gate.weight", 4))
    assert areas == pytest.approx([areas[0]] * 4, rel=0.01)


def test_a_column_cut_goes_across_and_a_row_cut_down() -> None:
    down, across = (PART.findall(_find(f"mlp.{name}.weight", 2)) for name in ("w_gate", "w_down"))
    assert [(x, float(y) > 0) for _, _, x, y, _, _ in down] == [("0.00", False), ("0.00", True)]
    assert [(float(x) > 0, y) for _, _, x, y, _, _ in across] == [(False, "0.00"), (True, "0.00")]


def test_uneven_parts_look_uneven() -> None:
    # 8 KV heads over 3 ranks are 3, 3 and 2.
    areas = _areas(_find("attention.wk.weight", 3))
    assert [area / sum(areas) for area in areas] == pytest.approx([3 / 8, 3 / 8, 2 / 8], rel=0.01)


def test_replicated_heads_show_every_rank_that_holds_them_hatched() -> None:
    drawing = _find("attention.wk.weight", 16)
    parts = PART.findall(drawing)
    assert [ranks for ranks, *_ in parts] == [str(rank) for rank in range(16)]
    # Two ranks hold the same rows, so they stand side by side.
    assert Counter(y for *_, y, _, _ in parts).most_common(1)[0][1] == 2
    assert drawing.count('class="hatch"') == 16
    assert "as do 1 others" in drawing
    assert "gradient summed over tp/kv" in drawing


def test_what_every_rank_holds_is_one_part_of_all() -> None:
    ((ranks, words, *_),) = PART.findall(_find("norm.weight", 4))
    assert ranks == "0 1 2 3"
    assert words.startswith("all of it on every rank")


def test_words_say_the_interval() -> None:
    words = [words for _, words, *_ in PART.findall(_find("embedding.weight", 2))]
    assert words == [
        f"tp rank {rank} owns V {interval} of 128,256: embedding.weight"
        for rank, interval in enumerate(["0:64128", "64128:128256"])
    ]


def test_activations_follow_forward_from_shards_to_gathered_to_addends() -> None:
    drawn = [(each.name, str(each.layout)) for each in list_activations(predict_one(PlanConfig(tp=4)))]
    start = drawn.index(("mlp_norm: y", "[T/tp, D]"))
    assert drawn[start : start + 7] == [
        ("mlp_norm: y", "[T/tp, D]"),
        ("mlp.w_gate|w_up: x", "[T, D]"),
        ("mlp.w_gate: y", "[T, F/tp]"),
        ("mlp.w_up: y", "[T, F/tp]"),
        ("mlp: y", "[T, F/tp]"),
        ("mlp.w_down: y", "[T, D] partial(tp)"),
        ("mlp.w_down: y", "[T/tp, D]"),
    ]


def test_every_weight_is_drawn_and_nothing_is_drawn_outside() -> None:
    prediction = predict_one(PlanConfig(tp=4))
    drawing = draw_all(list_weights(prediction), 4)
    assert drawing.count("<figure") == 12
    boxes = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)".*?</svg>', drawing)
    for (width, height), svg in zip(boxes, re.findall(r"<svg.*?</svg>", drawing), strict=True):
        for *_, x, y, part_width, part_height in PART.findall(svg):
            assert float(x) + float(part_width) <= float(width) + 0.1
            assert float(y) + float(part_height) <= float(height) + 0.1


def test_one_rank_owns_everything_without_hatching() -> None:
    drawing = draw_all(list_weights(predict_one(PlanConfig())), 1)
    assert "hatch" not in drawing
    assert draw_legend(1).count("<button") == 1
