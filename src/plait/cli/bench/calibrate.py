"""`plait bench calibrate`: what this machine computes and moves, as a catalog file of the planner."""

from pathlib import Path

import click

from plait.bench.calibrate import measure_collectives, measure_device
from plait.cli.files import list_unwritable
from plait.comm.launch import LocalRanks
from plait.errors import ConfigError
from plait.planner.hardware import MeasuredRates, load_hardware, measured_path, save_measured

_BASE = "cpu"
"""The catalog's entry of what is not measured: topology, overlap, attention."""


@click.command("calibrate")
@click.option("--tp", type=click.IntRange(2), multiple=True, default=(2,), show_default=True, help="Degrees to measure")
@click.option("--out", "path", type=Path, help="Where to write [default: what --hardware measured reads]")
def command(tp: tuple[int, ...], path: Path | None) -> None:
    """Measure GEMMs, memory and collectives between local ranks of this machine's CPUs.

    The file is what `plait plan --hardware measured` reads. All ranks measure at once, as they will compute at once;
    other work on the machine makes it look slower than it is.
    """
    target = path or measured_path()
    if target.suffix != ".toml":
        raise ConfigError(f"{target}: a catalog file is a .toml file", hint=f"{target.stem}.toml")
    if path is not None and (problems := list_unwritable({"--out": path})):
        raise ConfigError.from_problems("bench calibrate", problems)
    with LocalRanks(min(tp), device_type="cpu") as ranks:
        device = ranks.call(measure_device, num_ranks=min(tp))[0]
    lines: dict[str, dict[int, tuple[tuple[float, float], ...]]] = {}
    for degree in sorted(set(tp)):
        with LocalRanks(degree, device_type="cpu") as ranks:
            for kind, pieces in ranks.call(measure_collectives, degree=degree)[0].items():
                lines.setdefault(kind, {})[degree] = pieces
    rates = MeasuredRates(**device, lines=lines)
    try:
        save_measured(target, rates, based_on=_BASE)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}", hint="--out FILE.toml") from error
    load_hardware(target)  # what was written is what will be read
    click.echo(f"{target}")
    click.echo(_describe(rates), err=True)


def _describe(rates: MeasuredRates) -> str:
    gemms = ", ".join(f"{rate / 1e9:.1f} GFLOP/s in {dtype}" for dtype, rate in rates.gemm_flops_per_s.items())
    return f"a rank computes {gemms}, and streams {rates.bytes_per_s / 1e9:.1f} GB/s"
