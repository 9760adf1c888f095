"""Every model on every kind of device, in odd numbers: there is a plan, or one error that says why not."""

import pytest

from plait.config.presets import list_presets
from plait.errors import PlaitError
from plait.planner import Cluster, list_hardware, load_hardware, plan

_PRESETS = sorted(list_presets())
_HARDWARE = list_hardware()


def _plan(name: str, hardware: str, num_devices: int, global_batch: int, seq_len: int = 96) -> None:
    model, cluster = list_presets()[name].config, Cluster(load_hardware(hardware), num_devices)
    try:
        report = plan(model, cluster, seq_len=seq_len, global_batch=global_batch)
    except PlaitError:
        return
    best = report.best
    assert best.plan.num_devices == num_devices
    assert 0 < best.step.low_s <= best.step_s <= best.step.high_s
    assert all(each.memory.margin_bytes >= 0 for each in report.ranked)
    assert sorted(each.step_s for each in report.ranked) == [each.step_s for each in report.ranked]
    assert best.constants


@pytest.mark.parametrize("num_devices", [1, 2, 3, 7])
@pytest.mark.parametrize("name", _PRESETS)
def test_every_preset_is_planned_or_refused(name: str, num_devices: int) -> None:
    hardware = _HARDWARE[(_PRESETS.index(name) + num_devices) % len(_HARDWARE)]
    _plan(name, hardware, num_devices, global_batch=2 * num_devices)


@pytest.mark.parametrize("hardware", _HARDWARE)
def test_small_models_are_planned_on_all_hardware(hardware: str) -> None:
    for name, num_devices, global_batch, seq_len in (("llama-tiny", 9, 9, 64), ("gpt-tiny", 8, 5, 1)):
        _plan(name, hardware, num_devices, global_batch, seq_len)
