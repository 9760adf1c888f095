"""`plait bench overlap` on real ranks, at sizes at which it says nothing about speed."""

import json
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest

import plait.cli.bench.overlap as module
from plait.cli.main import main


@pytest.fixture
def run(ranks, monkeypatch, capsys):
    """Run the command on the ranks of the session."""

    def run(*arguments):
        @contextmanager
        def lend(world_size, **_):
            yield ranks(world_size)

        monkeypatch.setattr(module, "LocalRanks", lend)
        with pytest.raises(SystemExit) as status:
            main(["bench", "overlap", *arguments])
        captured = capsys.readouterr()
        return status.value.code, captured.out, captured.err

    return run


SMALL = ("--tokens", "8", "--rounds", "1")


@pytest.mark.parametrize("what", ["mlp", "attention", "block", "ends"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])
def test_record_is_complete(run, what, model):
    overlap = ("overlap=full", "overlap.transport=ring", "overlap.chunks=2")
    status, out, err = run(model, "--what", what, *SMALL, "--json", *overlap)
    assert status == 0, err
    record = json.loads(out)
    assert record["workload"] | {"width": 0} == {
        "what": what, "tokens": 8, "width": 0, "dtype": "float32", "quantization": "none", "sequence_parallel": True,
    }  # fmt: skip
    assert record["machine"].keys() >= {"cpu", "cores", "torch", "load_average", "date"}
    assert [run["name"] for run in record["exposed"]] == ["library", "point to point"]
    (overlapped,) = record["overlapped"]
    assert overlapped["asked"] == "full chunks=2 transport=ring"
    assert {line["transport"] for line in overlapped["receipt"]["lines"]} == {"ring"}
    assert overlapped["gain_over"].keys() == {"library", "point to point"}
    assert overlapped["gain"] == overlapped["gain_over"][record["best_exposed"]]
    limit = overlapped["limit"]
    assert 0 < limit["max_s"] == max(limit["compute_s"], limit["communication_s"]) <= limit["schedule_s"] * (1 + 1e-9)
    fraction = overlapped["fraction_of_ideal"]["median"]
    assert fraction == pytest.approx(limit["schedule_s"] / overlapped["time_s"]["median"])
    assert overlapped["exposed_s"]["measured"] > 0


@pytest.mark.parametrize("what", ["mlp", "attention", "block"])
def test_workload_is_quantized_as_asked_and_the_record_says_what_multiplied(run, what):
    sizes = ("model.width=64", "model.num_heads=2", "model.num_kv_heads=2", "--tokens", "64", "--rounds", "1")
    overlap = ("overlap=full", "overlap.transport=ring", "overlap.method=direct")
    status, out, err = run("llama-tiny", "--what", what, *sizes, "--json", *overlap, "quantization=mxfp8")
    assert status == 0, err
    record = json.loads(out)
    assert record["workload"]["quantization"] == "mxfp8"
    lines = [line for each in (*record["exposed"], *record["overlapped"]) for line in each["receipt"]["lines"]]
    assert {(line["recipe"], line["kernel"]) for line in lines} == {("mxfp8", "emulated, float32 accumulator")}


def test_trace_and_timeline_show_every_rank_without_with_and_simulated(run, tmp_path):
    trace, timeline, out_path = (tmp_path / name for name in ("trace.json", "timeline.svg", "out.json"))
    files = ("--trace", str(trace), "--timeline", str(timeline), "--out", str(out_path))
    status, out, err = run(
        "llama-tiny", "--what", "mlp", "--tp", "3", *SMALL, *files,
        "overlap=full", "overlap.transport=ring", "overlap.chunks=2",
    )  # fmt: skip
    assert status == 0, err
    best = json.loads(out_path.read_text())["best_exposed"]
    titles = [best, "overlap=full chunks=2 transport=ring", "overlap=full chunks=2 transport=ring, simulated"]
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == [f"{title}: rank {rank}" for title in titles for rank in range(3)]
    spans = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert spans == {(process, track) for process in processes for track in range(3)}
    texts = "".join(ElementTree.parse(timeline).getroot().itertext())
    assert all(title in texts for title in titles)
    assert "times as fast" in out
    assert "compute only" in out


@pytest.mark.parametrize(
    "asked", [("overlap=disabled",), ("overlap=full", "overlap.method=none", "overlap.transport=ring")]
)
def test_a_config_is_not_compared_with_itself(run, asked):
    status, out, err = run("llama-tiny", "--what", "mlp", *SMALL, *asked)
    assert (status, out) == (2, "")
    assert "these two runs cannot be compared, they did the same: none" in err


def test_one_rank_has_nothing_to_compare(run):
    status, _, err = run("llama-tiny", "--tp", "1")
    assert status == 2
    assert "parallel.tp = 1: what is measured is one tp group of several ranks" in err


def test_more_tokens_than_positions_are_refused(run):
    status, _, err = run("llama-tiny", "--tokens", "100000")
    assert status == 2
    assert "100000 tokens, but the model has" in err


def test_file_that_is_no_picture_is_refused_before_ranks_start(run, tmp_path):
    status, _, err = run("llama-tiny", "--timeline", str(tmp_path / "timeline.txt"))
    assert status == 2
    assert "a timeline can be a .svg, .png, .pdf file" in err
