"""Bars, traces and pictures of runs, measured and simulated."""

import json
from xml.etree import ElementTree

import pytest

from plait.bench import drawing
from plait.bench.bars import RankView, Seen, build_measured_chart, build_simulated_chart
from plait.bench.drawing import check_can_draw, save_timeline
from plait.bench.recorder import Taken
from plait.errors import ConfigError
from plait.schedule.chart import Bar, Chart
from plait.schedule.costs import Costs
from plait.schedule.piece import Piece
from plait.schedule.program import build_program
from plait.schedule.simulate import simulate
from plait.schedule.step import Add, Collect, Content, Message, Method, Multiply, Wait
from plait.schedule.trace_file import TRACK_NAMES, build_trace
from plait.schedule.work import derive_column_forward
from plait.sharding import Interval, Replicate, Shard, derive_transition

WORK = derive_column_forward(derive_transition(Shard(0), Replicate()), 8, 2)
ROWS = Interval(0, 4)


def build_message(source: int, target: int, round: int = 0) -> Message:
    return Message("x", Content.VALUE, Piece(source, 0, ROWS), source, target, round)


def list_bars(chart: Chart) -> list[tuple[int, str, str, float, float]]:
    return [(bar.rank, bar.track, bar.kind, bar.start_s, bar.end_s) for bar in chart.bars]


def simulate_work() -> Chart:
    costs = Costs({"forward": lambda rows: rows * 1.0}, {"x": 1.0}, bytes_per_s=1.0)
    timeline = simulate([build_program(WORK, Method.DIRECT, 2, rank) for rank in range(2)], costs)
    return build_simulated_chart("simulated", [timeline, timeline])


def test_transfer_is_drawn_from_when_both_ends_were_ready_and_the_one_before_was_through():
    first, second = build_message(0, 1), build_message(0, 1, 1)
    sender = RankView((), (Seen(first, "send", 10.0, 14.0), Seen(second, "send", 10.0, 16.0)))
    receiver = RankView((), (Seen(first, "recv", 11.0, 15.0), Seen(second, "recv", 9.0, 17.0)))
    assert list_bars(build_measured_chart("run", [sender, receiver])) == [
        (0, "send", "gather", 0.0, 3.0),
        (0, "send", "gather", 3.0, 5.0),
        (1, "recv", "gather", 0.0, 4.0),
        (1, "recv", "gather", 4.0, 6.0),
    ]


def test_messages_of_one_round_in_two_passes_are_told_apart():
    message = build_message(1, 0)
    sender = RankView((), (Seen(message, "send", 1.0, 2.0), Seen(message, "send", 5.0, 6.0)))
    receiver = RankView((), (Seen(message, "recv", 0.0, 2.0), Seen(message, "recv", 4.0, 6.0)))
    assert [bar.start_s for bar in build_measured_chart("run", [receiver, sender]).bars] == [0.0, 4.0, 0.0, 4.0]


def test_what_the_host_did_is_on_the_track_of_computing_and_waits_are_not():
    taken = (
        Taken(None, 1.0, 2.0),
        Taken(Multiply("dgrad", ROWS), 2.0, 3.0),
        Taken(Wait(build_message(1, 0)), 3.0, 4.0),
        Taken(Add("dx", Piece(0, 0, ROWS), (0, 1)), 4.0, 5.0),
    )
    seen = (Seen(build_message(1, 0), "recv", 1.0, 4.0),)
    assert list_bars(build_measured_chart("run", [RankView(taken, seen)])) == [
        (0, "compute", "other", 0.0, 1.0),
        (0, "compute", "dgrad", 1.0, 2.0),
        (0, "compute", "add", 3.0, 4.0),
        (0, "recv", "gather", 0.0, 3.0),
    ]


def test_where_no_message_was_watched_the_host_is_seen_waiting():
    taken = (Taken(Collect("x"), 0.0, 2.0), Taken(Wait(build_message(1, 0)), 2.0, 3.0))
    assert list_bars(build_measured_chart("run", [RankView(taken, ())])) == [
        (0, "send", "collective", 0.0, 2.0),
        (0, "recv", "collective", 0.0, 2.0),
        (0, "recv", "wait", 2.0, 3.0),
    ]


def test_simulated_passes_are_drawn_one_behind_the_other():
    chart = simulate_work()
    # Own rows take as long as those of the other need to come; then these are multiplied, two by two.
    assert chart.duration_s == 2 * (4 + 4)
    compute = [bar for bar in chart.bars if (bar.rank, bar.track) == (0, "compute")]
    assert [(bar.start_s, bar.end_s) for bar in compute] == [(0, 4), (4, 6), (6, 8), (8, 12), (12, 14), (14, 16)]
    assert {bar.kind for bar in chart.bars} == {"forward", "gather"}
    assert chart.num_ranks == 2


def test_trace_has_both_kinds_of_tracks_for_each_rank_of_each_chart():
    charts = [simulate_work(), Chart("other", (Bar(0, "recv", "wait", "wait x", 0.5, 0.75),))]
    events = json.loads(json.dumps(build_trace(charts)))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "simulated: rank 0", 1: "simulated: rank 1", 2: "other: rank 0"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert threads == {(pid, tid): name for pid in range(3) for tid, name in enumerate(TRACK_NAMES.values())}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(span["pid"], span["tid"]) for span in spans} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2)}
    assert [(span["ts"], span["dur"]) for span in spans if span["pid"] == 2] == [(0.5e6, 0.25e6)]


def test_every_kind_of_bar_has_a_color_and_a_name():
    assert set(drawing.COLORS) == set(drawing.LEGEND)


def test_svg_names_charts_ranks_and_durations(tmp_path):
    path = tmp_path / "timeline.svg"
    save_timeline([simulate_work()], path)
    texts = {text.strip() for text in ElementTree.parse(path).getroot().itertext()}
    assert {
        "simulated: 16 s",
        "rank 0 compute",
        "rank 1 communication",
        "forward GEMM",
        "rows that are gathered",
    } <= texts
    assert "library's collective" not in texts


def test_equal_charts_give_equal_files(tmp_path):
    for name in ("one.svg", "other.svg"):
        save_timeline([simulate_work()], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_picture_has_a_bar_for_each_event(tmp_path):
    chart = simulate_work()
    save_timeline([chart], tmp_path / "timeline.svg")
    drawn = sum(bar.track != "send" for bar in chart.bars)
    root = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    groups = [each for each in root.iter() if each.get("id", "").startswith("FillBetweenPolyCollection")]
    groups += [each for each in root.iter() if each.get("id", "").startswith("PolyCollection")]
    bars = sum(1 for group in groups for each in group.iter() if each.tag.endswith(("}use", "}path")))
    assert bars >= drawn


def test_other_files_than_pictures_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"timeline\.txt: a timeline can be a \.svg, \.png, \.pdf file"):
        check_can_draw(tmp_path / "timeline.txt")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'plait\[bench\]'"):
        check_can_draw(tmp_path / "timeline.svg")
