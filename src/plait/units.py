"""Printing of quantities; everywhere else they are SI base units with the unit in the name."""

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_si(value: float, unit: str, *, digits: int = 3) -> str:
    """`67108864, "B"` -> `67.1 MB`: decimal prefixes, `digits` significant digits, whole numbers below 1000 exact."""
    for scale, prefix in _SI:
        scaled = float(f"{value / scale:.{digits}g}")
        if abs(scaled) >= 1:
            decimals = max(0, digits - len(str(int(abs(scaled)))))
            return f"{scaled:.{decimals}f} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}".rstrip() if value != int(value) else f"{int(value)} {unit}".rstrip()


def format_bytes(value_bytes: float) -> str:
    """`67.1 MB`."""
    return format_si(value_bytes, "B")


def format_flops(value_flops: float) -> str:
    """`4.40 TFLOP`."""
    return format_si(value_flops, "FLOP")


def format_seconds(value_s: float) -> str:
    """`1.25 s`, `310 ms`, `12 us`, `3 min 05 s`, `31 h 46 min`, `3 d 04 h`."""
    if value_s >= 60:
        seconds, minutes, hours = (round(value_s / unit_s) for unit_s in (1, 60, 3600))
        if seconds < 3600:
            return f"{seconds // 60} min {seconds % 60:02d} s"
        if hours < 48:
            return f"{minutes // 60} h {minutes % 60:02d} min"
        return f"{hours // 24} d {hours % 24:02d} h"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        scaled = float(f"{value_s / scale:.3g}")
        if scaled >= 1:
            return f"{scaled:.3g} {unit}"
    return f"{value_s / 1e-9:.3g} ns"
