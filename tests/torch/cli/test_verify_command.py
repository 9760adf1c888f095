"""What `plait verify` makes of what it is given, before any rank is started."""

from pathlib import Path

import pytest

from plait.cli.verify import _load_config

PIPELINE = """
[model]
preset = "llama-tiny"
[parallel]
pp = 2
[pipeline]
schedule = "interleaved"
stages_per_rank = 2
[train]
gradient_accumulation = 16
"""


def test_a_pipeline_gets_as_many_micro_batches_as_ranks(tmp_path: Path) -> None:
    """Of a run, or asked for; a schedule has its needs, and the run's own number would take long."""
    file = tmp_path / "run.toml"
    file.write_text(PIPELINE)
    config = _load_config(str(file), ["model.num_layers=4"], None, no_sequence_parallel=False)
    assert (config.train.gradient_accumulation, config.pipeline.stages_per_rank) == (2, 2)
    asked = _load_config("llama-tiny", ["parallel.pp=2"], None, no_sequence_parallel=False)
    assert (asked.train.gradient_accumulation, asked.pipeline.schedule) == (2, "1f1b")


@pytest.mark.parametrize(("overrides", "number"), [((), 1), (("train.gradient_accumulation=3",), 3)])
def test_without_a_pipeline_there_is_one_unless_more_are_asked_for(overrides: tuple[str, ...], number: int) -> None:
    config = _load_config("llama-tiny", overrides, None, no_sequence_parallel=False)
    assert config.train.gradient_accumulation == number
