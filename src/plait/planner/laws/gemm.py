"""GEMMs: tiles on multiprocessors, or bytes from memory, whichever takes longer."""

from functools import cache, lru_cache
from math import ceil, hypot, inf

from plait.planner.hardware import Hardware, Regime
from plait.planner.hardware.device import Derate, GemmConstants
from plait.planner.laws.estimate import Estimate, Limit

_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.06), (64, 128, 1.15))
"""Rows and columns of a tile, and by which factor smaller ones are less efficient; libraries choose the best."""

_WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 0.5}

_FITTED_FROM = 512
"""The law was fitted to shapes whose every dimension is at least this; thinner ones stream like any other kernel."""

_LONG_FLOPS = 1e12
"""From here on a single GEMM takes long enough to slow the clock down; the other regimes have that in their share."""

_BEYOND = 2.0
"""How much less is known of shapes the law was not fitted to."""

_LATENCY_SHARE = 0.5
"""A GEMM whose launch takes more than this share is bound by it."""


@lru_cache(maxsize=65536)
def estimate_gemm(
    hardware: Hardware,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "bfloat16",
    regime: Regime = "training",
    count: int = 1,
) -> Estimate:
    """How long `count` independent `[m, k] @ [k, n]` take as one kernel; `dtype` is that of the operands.

    A product in float8 or float4 is the GEMM alone: its quantise passes are `estimate_quantize`.

    Raises:
        ConfigError: the catalog has no law for the number format.
    """
    law = hardware.gemm(dtype)
    rate = hardware.peak(dtype).value * law.efficiency.value * derive_regime_share(hardware.derate, regime, law.regime)
    if regime == "burst" and 2 * count * m * n * k > _LONG_FLOPS:
        rate *= hardware.derate.long_burst.value
    num_sm = hardware.num_multiprocessors.value
    compute_s = _count_tile_flops(law, num_sm, (m, n, k), count) * num_sm / rate
    width = _WIDTH_BYTES[dtype]
    num_bytes = count * (width * (m * k + k * n) + max(2, width) * m * n)
    is_fitted = min(m, n, k) >= _FITTED_FROM
    streaming = law.memory_efficiency if is_fitted else hardware.memory.efficiency
    memory_s = num_bytes / (hardware.memory.bytes_per_s.value * streaming.value)
    launch_s = law.launch_s.value
    seconds = launch_s + max(compute_s, memory_s)
    limit: Limit = (
        "latency" if launch_s > _LATENCY_SHARE * seconds else "compute" if compute_s >= memory_s else "memory"
    )
    uncertainty, constants = _describe(hardware, dtype, regime)
    return Estimate(seconds, uncertainty if is_fitted else _BEYOND * uncertainty, constants, limit)


def derive_regime_share(derate: Derate, regime: Regime, measured: Regime) -> float:
    """What a rate `measured` in one regime is multiplied by to hold in another."""
    return _share(derate, regime) / _share(derate, measured)


def _share(derate: Derate, regime: Regime) -> float:
    if regime == "burst":
        return 1.0
    return derate.sustained.value if regime == "sustained" else derate.training.value


def _count_tile_flops(law: GemmConstants, num_sm: float, shape: tuple[int, int, int], count: int) -> float:
    """FLOPs that the busiest multiprocessor spends with the best tile, those of begin and end of its tiles included."""
    m, n, k = shape
    weight, depth = law.wave_weight.value, k + law.prologue.value
    least = inf
    for rows, columns, penalty in _TILES:
        waves = count * -(-m // rows) * -(-n // columns) / num_sm
        shared = max((1 - weight) * waves + weight * ceil(waves), min(1.0, max(waves, weight)))
        least = min(least, penalty * shared * 2 * rows * columns * depth)
    return least


@cache
def _describe(hardware: Hardware, dtype: str, regime: Regime) -> tuple[float, tuple[str, ...]]:
    """How uncertain the law is, and the constants it takes."""
    law, memory = hardware.gemm(dtype), hardware.memory
    used = [law.efficiency, law.prologue, law.wave_weight, law.memory_efficiency, law.launch_s, memory.bytes_per_s]
    used += [hardware.num_multiprocessors]
    spread = law.efficiency.uncertainty
    for name in (regime, law.regime) if regime != law.regime else ():
        if name != "burst":
            derate = hardware.derate.sustained if name == "sustained" else hardware.derate.training
            used.append(derate)
            spread = hypot(spread, derate.uncertainty)
    return spread, (hardware.peak(dtype).name, *(constant.name for constant in used))
