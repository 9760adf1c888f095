"""What a forward is spent on, by what would shorten it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from plait.contract.collective import Collective
from plait.contract.op import Op
from plait.contract.step import list_gemms
from plait.planner.cost import Cost, Kind
from plait.planner.inference.circumstance import ServingCircumstance
from plait.planner.laws import estimate_gemm
from plait.planner.planned import is_linear


class Term(StrEnum):
    """What time is spent on, by what would shorten it."""

    WEIGHTS = "weights bandwidth"
    """GEMMs of so few tokens that reading the weights takes longer than multiplying by them."""
    KV_CACHE = "KV bandwidth"
    """Keys and values of all requests, read for every token."""
    COMPUTE = "compute"
    LATENCY = "all-reduce latency"
    """What collectives would take if they were empty."""
    LINKS = "link bandwidth"
    """What they take beyond that, as far as nothing is computed beneath."""
    KERNELS = "other kernels"
    """Norms, residuals, activations, caches, sampling: mostly launches where tokens are few."""


def sum_terms(cost: Cost, where: ServingCircumstance, last: ServingCircumstance) -> dict[Term, float]:
    """Seconds of a forward's tree by term; `last` is the circumstance of its head."""
    totals = dict.fromkeys(Term, 0.0)
    limits = _list_limits(where.contract.block, where, where.gemm_dtype)
    limits |= _list_limits(last.contract.exit, last, last.plan.precision.compute)
    for leaf, times, around in _list_leaves(cost):
        seconds = times * leaf.seconds
        match leaf.kind:
            case Kind.GEMM:
                totals[next(limits[name] for name in around if name in limits)] += seconds
            case Kind.ATTENTION:
                is_cached = where.contract.setting.seq_len == 1
                totals[Term.KV_CACHE if is_cached else Term.COMPUTE] += seconds
            case Kind.MEMORY_BOUND:
                totals[Term.KERNELS] += seconds
            case Kind.COMMUNICATION:
                latency_s = sum(_estimate_latency_s(each, where) for each in leaf.collectives)
                totals[Term.LATENCY] += times * min(leaf.seconds, latency_s)
                totals[Term.LINKS] += times * max(0.0, leaf.seconds - latency_s)
    return totals


def _list_leaves(
    cost: Cost, times: float = 1.0, around: tuple[str, ...] = ()
) -> Iterator[tuple[Cost, float, tuple[str, ...]]]:
    """Every leaf, how often it happens, and the names of the nodes around it, the nearest first."""
    if not cost.parts:
        yield cost, times, around
    for part in cost.parts:
        yield from _list_leaves(part, times * cost.times, (cost.name, *around))


def _list_limits(ops: Iterable[Op], where: ServingCircumstance, dtype: str) -> dict[str, Term]:
    """By name of the operation, whether its largest GEMM waits for the multiplications or for the weights."""
    limits = {}
    for op in ops:
        if is_linear(op):
            gemm = max(list_gemms(op.forward), key=lambda each: each.flops)
            estimate = estimate_gemm(where.hardware, gemm.m, gemm.n, gemm.k, dtype=dtype)
            limits[op.name] = Term.COMPUTE if estimate.limit == "compute" else Term.WEIGHTS
    return limits


def _estimate_latency_s(collective: Collective, where: ServingCircumstance) -> float:
    return where.estimate_move(replace(collective, shape=(1,))).seconds
