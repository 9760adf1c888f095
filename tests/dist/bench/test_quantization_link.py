"""The benchmark of precision recipes over a link, at sizes and without a link at which its times say nothing."""

import sys

import pytest

from tests.support.source_tree import ROOT

BENCHMARKS = str(ROOT / "benchmarks")


def measure_rank():
    sys.path.insert(0, BENCHMARKS)
    try:
        import quantization_link

        return quantization_link.measure(1 / 16, [1.0], 1, set_rate=lambda bytes_per_s: None)
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def record(ranks):
    return ranks(2).call(measure_rank)[0]


def test_what_a_step_sends_is_what_its_schedules_say(record):
    for name, sent in record["sent_bytes"].items():
        assert sent["measured"] == sent["predicted"] > 0, name


def test_narrower_formats_send_less(record):
    sent = {name: each["measured"] for name, each in record["sent_bytes"].items()}
    assert sent["nvfp4"] < sent["mxfp8"] < sent["bfloat16"] < sent["float32"]
    assert sent["fp8_currentscaling"] < sent["mxfp8"]
    assert sent["float32"] == 2 * sent["bfloat16"]


def test_only_scales_of_tensors_are_agreed_on(record):
    agreed = {name: each["magnitudes"] for name, each in record["sent_bytes"].items()}
    assert agreed["float32"] == agreed["bfloat16"] == agreed["mxfp8"] == 0
    assert 0 < agreed["fp8_currentscaling"] <= agreed["nvfp4"] < 200


def test_every_format_is_timed_alone_exposed_and_overlapped(record):
    formats = record["ratios"]["1.0"]["formats"]
    assert formats.keys() == record["sent_bytes"].keys()
    for each in formats.values():
        assert each.keys() == {"compute_s", "exposed_s", "overlapped_s", "gain_over"}
        assert each["gain_over"].keys() == {"float32", "bfloat16"}
