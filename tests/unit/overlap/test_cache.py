"""Measured rates are kept by what decides them, grow old, and never stand in the way when damaged."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.overlap.machine import cache
from plait.overlap.machine.cache import MAX_AGE_S, cache_folder, load_rates, rates_path, save_rates
from plait.overlap.machine.rates import GemmRates, LibraryRates, LinkRates, Rates

KEY: dict[str, Any] = {"hosts": ["here"], "num_ranks": 2, "torch": "2.13.0", "transports": ["library", "ring"]}
RATES = Rates(
    GemmRates(1e-6, 5e10, 12.5),
    LibraryRates(1e-3, 1e9, 2e9, 3e9),
    (LinkRates("ring", 1e-5, 1e-4, 1e9, 1e-6, 1e9, 0.5),),
)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    assert load_rates(tmp_path / "new", KEY) is None
    save_rates(tmp_path / "new", KEY, RATES)
    assert load_rates(tmp_path / "new", KEY) == RATES


@pytest.mark.parametrize("name", KEY)
def test_nothing_is_found_for_another(name: str, tmp_path: Path) -> None:
    save_rates(tmp_path, KEY, RATES)
    assert load_rates(tmp_path, {**KEY, name: "other"}) is None


def test_a_file_that_is_there_by_chance_is_not_taken_for_the_key(tmp_path: Path) -> None:
    save_rates(tmp_path, KEY, RATES)
    other = {**KEY, "num_ranks": 4}
    rates_path(tmp_path, KEY).rename(rates_path(tmp_path, other))
    assert load_rates(tmp_path, other) is None


@pytest.mark.parametrize(("age_s", "is_found"), [(MAX_AGE_S - 60, True), (MAX_AGE_S + 60, False), (-60, False)])
def test_rates_grow_old(age_s: float, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rates(tmp_path, KEY, RATES)
    now_s = cache.time.time()
    monkeypatch.setattr(cache.time, "time", lambda: now_s + age_s)
    assert (load_rates(tmp_path, KEY) is not None) == is_found


def damage(**changes: Any) -> str:
    """The file with one number of the GEMM's changed."""
    rates = RATES.to_json()
    rates["gemm"] |= changes
    return json.dumps({"key": KEY, "measured_at_s": cache.time.time(), "rates": rates})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}", '{"key": 1}', "\0\0", damage(call_s="1"), damage(call_s=-1.0),
        damage(flops_per_s=0.0), damage(flops_per_s=float("nan")), damage(extra_rows=None), damage(unknown=1.0),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_measured_again(text: str, tmp_path: Path) -> None:
    path = rates_path(tmp_path, KEY)
    path.write_text(text)
    with pytest.warns(UserWarning, match=re.escape(f"{path}: ignored, and measured again")):
        assert load_rates(tmp_path, KEY) is None
    save_rates(tmp_path, KEY, RATES)
    assert load_rates(tmp_path, KEY) == RATES


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    save_rates(tmp_path, KEY, RATES)
    save_rates(tmp_path, KEY, replace(RATES, links=()))
    assert load_rates(tmp_path, KEY) == replace(RATES, links=())
    assert [path.name for path in tmp_path.iterdir()] == [rates_path(tmp_path, KEY).name]


def test_a_folder_that_cannot_be_written_to_is_named_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written .*, so rates are measured each time"):
        save_rates(tmp_path / "file", KEY, RATES)
    with pytest.warns(UserWarning, match="ignored, and measured again"):
        assert load_rates(tmp_path / "file", KEY) is None


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/plait")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/plait")


def test_a_good_file_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_rates(tmp_path, KEY, RATES)
        assert load_rates(tmp_path, KEY) == RATES
