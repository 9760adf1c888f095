"""Degrees that multiply to the devices; each that is refused says why."""

from hypothesis import given
from hypothesis import strategies as st

from plait.config.presets import load_preset
from plait.planner.cluster import Cluster
from plait.planner.hardware import load_hardware
from plait.planner.space.degrees import Task, list_degrees, list_divisors

H100 = load_hardware("h100")


def build_task(num_devices: int, *, model: str = "llama3-8b", seq_len: int = 4096, global_batch: int = 64) -> Task:
    return Task(load_preset(model), Cluster(H100, num_devices), seq_len, global_batch)


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide(number: int) -> None:
    assert list_divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@given(st.sampled_from([1, 6, 8, 24, 64]), st.sampled_from([12, 64, 96]))
def test_all_multiply_to_the_devices_and_divide_the_batch(num_devices: int, global_batch: int) -> None:
    kept, _ = list_degrees(build_task(num_devices, global_batch=global_batch), {})
    assert kept == sorted(set(kept))
    for each in kept:
        assert each.tp * each.cp * each.pp * each.dp == num_devices
        assert global_batch % each.dp == 0


def test_a_degree_that_the_model_cannot_be_cut_into_is_refused_once_with_the_reason() -> None:
    _, refused = list_degrees(build_task(64), {})
    (tp,) = [each for each in refused if each.what == "tp = 64"]
    assert "layers.0.attention.wq.weight" in tp.reason
    (pp,) = [each for each in refused if each.what == "pp = 64"]
    assert pp.reason == "32 blocks cannot be shared out over so many stages"


def test_sequences_are_cut_in_zigzag_order() -> None:
    kept, refused = list_degrees(build_task(8, seq_len=4100), {})
    assert {each.cp for each in kept} == {1, 2}
    assert [each.what for each in refused if each.what.startswith("cp")] == ["cp = 4", "cp = 8"]


def test_a_batch_that_dp_does_not_divide_is_refused_with_the_dp() -> None:
    _, refused = list_degrees(build_task(8, global_batch=4), {"tp": 1, "cp": 1, "pp": 1})
    (only,) = refused
    assert only.what == "tp = 1, cp = 1, pp = 1"
    assert only.reason == "leaves dp = 8, into which a global batch of 4 cannot be divided"


def test_groups_that_are_fixed_leave_only_their_dp() -> None:
    kept, _ = list_degrees(build_task(16), {"dp_replicate": 2, "dp_shard": 4})
    assert {each.dp for each in kept} == {8}
