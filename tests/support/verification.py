"""Verifications of small models: their configs, and unsharded references that tests share."""

from functools import lru_cache

from plait.config.load import load_run_config
from plait.config.run import RunConfig
from plait.verify.report import Report
from plait.verify.runtime.parity import Reference, build_reference, check_parity

_SMALL = ("precision.compute=float32", "train.micro_batch_size=2", "train.seq_len=8")


def build_config(source: str, tp: int, *overrides: str, sequence_parallel: bool = True) -> RunConfig:
    """Two sequences of 8 tokens in float32, unless overridden."""
    mode = f"parallel.sequence_parallel={str(sequence_parallel).lower()}"
    return load_run_config(source, [*_SMALL, f"parallel.tp={tp}", mode, *overrides])


@lru_cache(maxsize=32)
def derive_reference(source: str, overrides: tuple[str, ...]) -> Reference:
    """What the unsharded model computes; it knows neither degree nor mode, nor what is overlapped."""
    return build_reference(build_config(source, 1, *overrides))


def verify(ranks, source: str, tp: int, *overrides: str, sequence_parallel: bool = True) -> Report:
    """The report of one verification on `ranks`."""
    config = build_config(source, tp, *overrides, sequence_parallel=sequence_parallel)
    about_model = tuple(
        override for override in overrides if not override.startswith(("overlap", "parallel.cp", "context"))
    )
    return check_parity(config, ranks, derive_reference(source, about_model))
