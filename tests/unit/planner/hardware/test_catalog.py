"""Names, aliases and files of hardware."""

import re
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.planner.hardware import Provenance, list_hardware, load_hardware
from plait.planner.hardware.catalog import FOLDER
from tests.support.hardware import list_rows

PROMISED = {"a100", "h100", "h200", "b200", "gb200-nvl72", "mi300x", "cpu"}


def test_what_was_promised_is_there() -> None:
    assert set(list_hardware()) >= PROMISED
    assert not [name for name in list_hardware() if name.startswith("_")]


@pytest.mark.parametrize("name", list_hardware())
def test_every_constant_says_where_it_comes_from_and_when(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert len(hardware.constants) > 30
    for key, constant in hardware.constants.items():
        assert key == constant.name
        assert constant.source, key
        assert constant.date.startswith("20"), key
        assert constant.confidence in ("high", "medium", "low", "illustrative"), key
        if constant.low is not None and constant.high is not None:
            assert constant.low <= constant.value <= constant.high, key


@pytest.mark.parametrize("name", list_hardware())
def test_what_is_fitted_on_accelerators_states_its_error(name: str) -> None:
    hardware = load_hardware(name)
    fitted = [key for key in hardware.constants if key.startswith(("gemm.bfloat16.", "collectives.all_reduce."))]
    for key in fitted:
        constant = hardware.constants[key]
        if constant.provenance is Provenance.FITTED:
            assert constant.error is not None, key
        if constant.provenance is Provenance.ASSUMED:
            assert constant.uncertainty >= 0.25, key


def test_values_are_in_base_units() -> None:
    h100 = load_hardware("h100")
    assert h100.memory.capacity_bytes.value == 80e9
    assert h100.peak("bfloat16").value == 989e12
    assert h100.peak("float16") is h100.peak("bfloat16")
    assert h100.gemm("bfloat16").launch_s.value == pytest.approx(2.75e-6)
    assert h100.links.lines["all_reduce"][8].pieces == (
        (pytest.approx(15.99e-6), pytest.approx(212.8e9)),
        (pytest.approx(65.38e-6), pytest.approx(457.5e9)),
    )
    assert h100.constants["collectives.all_reduce.8"].error == pytest.approx(0.046)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("A100-SXM4-80GB", "a100"), ("a100 sxm", "a100"), ("H100-SXM5-80GB", "h100"), ("H200", "h200"),
        ("GB200 NVL72", "gb200-nvl72"), ("GB200", "gb200-nvl72"), ("mi300X", "mi300x"), ("CPU", "cpu"),
    ],
)  # fmt: skip
def test_aliases_are_found_in_any_case(alias: str, name: str) -> None:
    assert load_hardware(alias) is load_hardware(name)


def test_measured_rows_name_what_is_known_or_known_to_be_missing() -> None:
    uncovered = {"L20", "GH200 SXM", "MI325X", "MI355X", "unstated", "unstated (Blackwell implied)"}
    names = {row["hardware"]["gpu"] for row in list_rows("")}
    assert names > uncovered
    for name in names - uncovered:
        load_hardware(name)
    for name in uncovered:
        with pytest.raises(ConfigError, match=f'hardware "{re.escape(name)}" is not covered: '):
            load_hardware(name)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match='there is no hardware "h10"') as raised:
        load_hardware("h10")
    assert raised.value.hint == 'did you mean "h100"?'


def test_nothing_measured_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="nothing has been measured here") as raised:
        load_hardware("measured")
    assert "plait bench calibrate" in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mine.toml: cannot be read"):
        load_hardware(tmp_path / "mine.toml")


def test_a_file_of_ones_own_states_its_differences(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "H100 with half the network"\nbased_on = "H100"\n'
        '[sources]\nme = { text = "ordered", date = "2026-11-01", provenance = "assumed", confidence = "low" }\n'
        '[topology]\nnic_bandwidth = { value = "25 GB/s", source = "me" }\n'
    )
    mine, h100 = load_hardware(str(path)), load_hardware("h100")
    assert mine.name == "mine"
    assert mine.topology.nic_bytes_per_s.value == 25e9
    assert mine.topology.nic_bytes_per_s.source == "ordered"
    differing = {key for key, constant in mine.constants.items() if constant != h100.constants[key]}
    assert differing == {"topology.nic_bandwidth"}


def test_a_copy_of_a_catalog_file_works_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text((FOLDER / "a100.toml").read_text())
    assert load_hardware(path).constants == load_hardware("a100").constants


def test_files_based_on_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('based_on = "b.toml"\n')
    (tmp_path / "b.toml").write_text('based_on = "a.toml"\n')
    with pytest.raises(ConfigError, match="based on each other"):
        load_hardware(tmp_path / "a.toml")


def test_a_file_based_on_itself_by_another_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.toml").write_text('based_on = "sub/../a.toml"\n')
    with pytest.raises(ConfigError, match="based on each other"):
        load_hardware(tmp_path / "a.toml")


def test_a_name_too_long_is_no_hardware() -> None:
    with pytest.raises(ConfigError, match="there is no hardware"):
        load_hardware("h" * 5000)


def test_a_base_that_is_not_known_lists_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('based_on = "h20"\n')
    with pytest.raises(ConfigError, match=r'based_on: there is no hardware "h20"\n\nhint: did you mean "h200"'):
        load_hardware(tmp_path / "a.toml")
