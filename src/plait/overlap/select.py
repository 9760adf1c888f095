"""Choosing how one collective GEMM runs: a pure function of what is asked, what there is to do and what it costs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from plait.config.overlap import OverlapConfig
from plait.errors import ConfigError
from plait.overlap.choice import FUSED, LIBRARY, Choice, Way
from plait.overlap.machine.rates import Rates
from plait.overlap.predict import Before, Prediction, predict
from plait.overlap.site import Site
from plait.schedule.program import list_methods
from plait.schedule.step import Method
from plait.schedule.work import Work

_CHUNKS = (1, 2, 4, 8, 16)
"""Those from which `auto` chooses. The optimum is flat: between two of them nothing is gained."""

_MIN_ROWS = 64
"""Of a piece, where chunks are chosen: MKL multiplies 64 rows at 79 % of its rate, 32 at 67 %."""

_MARGIN = 0.03
"""By which share a boundary must become faster before `auto` overlaps it: predictions are not better than that."""

_ALIKE = 0.01
"""Predictions that differ by less are the same."""

_USUAL_CHUNKS = 4
"""Without measurements: within 6 % of the best from a quarter to twice as much communication as computation."""

_USUAL_TRANSPORTS = ("shm", "symm_mem", "ring")
"""Without measurements: memory that both sides see goes before messages."""

_RINGS = (Method.RING, Method.RING_TWO_WAY)

_SERIAL = Way(Method.NONE, 1, LIBRARY)

_UNKNOWN = "there is no such transport here"

Capable = Mapping[str, frozenset[Method]]
"""The methods that each transport can execute."""


def choose(
    config: OverlapConfig,
    site: Site,
    work: Work,
    *,
    reachable: Mapping[str, str | None],
    rates: Rates | None,
    capable: Capable | None = None,
    before: Before | None = None,
) -> Choice:
    """Choose how `work` at `site` runs; equal arguments give equal choices, so all ranks choose alike.

    Where a pass `before` can begin its gather, the choice is for what is left then.

    `reachable` has every transport there is, with the reason why it cannot serve these ranks, or None. Without `rates`
    what the config leaves open is set to what is good nearly everywhere, and `auto` overlaps nothing.
    """
    choice = _choose(config, site, work, reachable, rates, capable or {}, before)
    is_plain = config.policy == "disabled" or not work.flows or choice.transport != LIBRARY
    # Ranks that share memory have their collectives in it, also where nothing is overlapped.
    return choice if is_plain or reachable.get("shm", _UNKNOWN) else replace(choice, transport="shm")


def _choose(
    config: OverlapConfig,
    site: Site,
    work: Work,
    reachable: Mapping[str, str | None],
    rates: Rates | None,
    capable: Capable,
    before: Before | None,
) -> Choice:
    reason = _find_reason_for_none(config, site, work)
    if reason is not None:
        return Choice(Method.NONE, 1, LIBRARY, reason, config.asked)
    ways, problem = _list_ways(config, work, reachable, capable)
    if not ways:
        may_be_none = config.policy == config.transport == config.method == "auto"
        return Choice(Method.NONE, 1, LIBRARY, problem, config.asked, is_as_asked=may_be_none)
    if config.method == "none":
        return _build_choice(config, ways[0], "asked for")
    if rates is not None:
        return _choose_by_cost(config, ways, partial(predict, work=work, site=site, rates=rates, before=before))
    if config.policy == "auto":
        return Choice(Method.NONE, 1, LIBRARY, "what computing and moving cost here was not measured", config.asked)
    usual = min(ways, key=_rank_unmeasured)
    return _build_choice(config, usual, "good nearly everywhere" if len(ways) > 1 else _name_only_way(config))


def needs_rates(config: OverlapConfig) -> bool:
    """Whether anything is left to the cost model, which knows nothing of operations that take no steps."""
    if config.policy == "disabled" or config.method == "none" or config.transport == FUSED:
        return False
    return "auto" in (config.policy, config.method, config.chunks, config.transport)


def check_transport(config: OverlapConfig, reachable: Mapping[str, str | None]) -> None:
    """Refuse a transport that was asked for by its name and cannot serve.

    Raises:
        ConfigError: with the reason, and the transports that can.
    """
    name = config.transport
    if config.policy == "disabled" or name == "auto" or reachable.get(name, _UNKNOWN) is None:
        return
    able = [other for other, problem in reachable.items() if problem is None and other != LIBRARY]
    raise ConfigError(
        f"overlap.transport = {name}: {reachable.get(name, _UNKNOWN)}",
        hint=f"{' and '.join(able)} can serve; overlap.transport=auto chooses" if able else "set overlap=disabled",
    )


def _find_reason_for_none(config: OverlapConfig, site: Site, work: Work) -> str | None:
    """Why nothing is to be overlapped, if nothing is: never because it cannot be."""
    if not work.flows:
        return "nothing moves"
    if config.policy == "disabled":
        return "disabled"
    if config.policy == "mlp_only" and site.region != "mlp":
        return f"belongs to the {site.region}, not to an MLP"
    return "there are no tokens" if not work.num_rows else None


def _list_ways(
    config: OverlapConfig, work: Work, reachable: Mapping[str, str | None], capable: Capable
) -> tuple[tuple[Way, ...], str]:
    """Every way that the config leaves open, or else why there is none."""
    methods, problem = _list_open_methods(config, work)
    transports, transport_problem = _list_open_transports(config, reachable)
    if problem or transport_problem:
        return (), problem or transport_problem
    ways = tuple(
        Way(method, chunks, transport)
        for transport in transports
        for method in methods
        if method in capable.get(transport, methods)
        for chunks in _list_open_chunks(config, work, method, transport)
    )
    return _drop_alike(config, work, ways), f"{' and '.join(transports)} cannot execute {' or '.join(methods)}"


def _list_open_methods(config: OverlapConfig, work: Work) -> tuple[tuple[Method, ...], str]:
    if config.method == "none":
        return (Method.NONE,), ""
    able = tuple(method for method in list_methods(work) if method is not Method.NONE)
    if config.method == "auto":
        # A chunk count that was asked for is not to be lost to a method without chunks.
        able = tuple(each for each in able if each is not Method.BULK or config.chunks in ("auto", 1))
        # Where little is to be hidden, a faster way than the library's may still be faster.
        return ((Method.NONE, *able) if config.policy == config.chunks == "auto" else able), ""
    method = Method(config.method)
    if method not in able:
        return (), "bulk needs a GEMM that does not need what moves, as only the backward of column linears has"
    return (method,), ""


def _list_open_transports(config: OverlapConfig, reachable: Mapping[str, str | None]) -> tuple[list[str], str]:
    if config.transport != "auto":
        problem = reachable.get(config.transport, _UNKNOWN)
        return ([], f"{config.transport}: {problem}") if problem else ([config.transport], "")
    if config.method == "none":
        return [LIBRARY], ""
    others = {name: problem for name, problem in reachable.items() if name != LIBRARY}
    able = [name for name, problem in others.items() if problem is None]
    listed = "; ".join(f"{name}: {problem}" for name, problem in others.items())
    return able, "" if able else listed or "there is no transport but the library's collectives"


def _list_open_chunks(config: OverlapConfig, work: Work, method: Method, transport: str) -> Iterator[int]:
    lengths = [length // flow.unit for flow in work.flows for length in flow.split.lengths if length]
    min_units = max(1, _MIN_ROWS // max(flow.unit for flow in work.flows))
    if method in (Method.BULK, Method.NONE) or transport == FUSED:
        yield 1
    elif config.chunks != "auto":
        yield min(config.chunks, max(lengths))
    else:
        yield from (chunks for chunks in _CHUNKS if chunks == 1 or min(lengths) >= chunks * min_units)


def _drop_alike(config: OverlapConfig, work: Work, ways: tuple[Way, ...]) -> tuple[Way, ...]:
    """Leave out what sends the same messages as another way: a ring of two is direct, one of one chunk has one way."""
    if config.method != "auto":
        return ways
    is_pair = work.flows[0].split.degree == 2

    def is_alike(way: Way) -> bool:
        if is_pair and way.method in _RINGS:
            return Way(Method.DIRECT, way.chunks, way.transport) in ways
        return way.method is Method.RING_TWO_WAY and way.chunks == 1

    return tuple(way for way in ways if not is_alike(way))


def _rank_unmeasured(way: Way) -> tuple[int, int, int]:
    """Least is best."""
    usual = [*_USUAL_TRANSPORTS, way.transport].index(way.transport)
    return usual, abs(way.chunks - _USUAL_CHUNKS), list(Method).index(way.method)


def _choose_by_cost(config: OverlapConfig, ways: tuple[Way, ...], predict: Callable[[Way], Prediction]) -> Choice:
    serial = predict(_SERIAL)
    predicted = {way: predict(way) for way in ways}
    least_s = min(each.duration_s for each in predicted.values())
    # Of ways that are alike the one with the fewest messages.
    alike = [way for way in ways if predicted[way].duration_s <= least_s * (1 + _ALIKE)]
    best = min(alike, key=lambda way: (way.chunks, predicted[way].duration_s))
    gain = 1 - predicted[best].duration_s / serial.duration_s
    if config.policy == "auto" and gain < _MARGIN:
        reason = f"overlapping would make it {-gain:.0%} slower" if gain < 0 else f"overlapping would gain {gain:.0%}"
        return Choice(
            Method.NONE, 1, LIBRARY, f"{reason} by the cost model ({best})", config.asked,
            predicted_s=serial.duration_s, predicted_exposed_s=serial.exposed_s, predicted_serial_s=serial.duration_s,
        )  # fmt: skip
    several = f"the fastest of {len(ways)} ways by the cost model"
    reason = several if len(ways) > 1 else _name_only_way(config)
    return _build_choice(config, best, reason, predicted[best], serial)


def _name_only_way(config: OverlapConfig) -> str:
    return "the only way" if "auto" in (config.method, config.chunks, config.transport) else "asked for"


def _build_choice(
    config: OverlapConfig, way: Way, reason: str, predicted: Prediction | None = None, serial: Prediction | None = None
) -> Choice:
    is_as_asked = config.chunks in ("auto", way.chunks)
    if not is_as_asked:
        reason = f"no rank has more than {way.chunks} rows" if way.transport != FUSED else f"{FUSED} has no chunks"
    return Choice(
        way.method, way.chunks, way.transport, reason, config.asked, is_as_asked,
        predicted.duration_s if predicted else None,
        predicted.exposed_s if predicted else None,
        serial.duration_s if serial else None,
    )  # fmt: skip
