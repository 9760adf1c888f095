"""What a step costs, as a tree: every node says how long, how sure, and from which constants."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack

from plait.contract.collective import Collective


class Kind(StrEnum):
    """What time is spent on; a leaf has one, and a chart has one colour for each."""

    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY_BOUND = "memory_bound"
    """Norms, residuals, activations, quantise passes, the loss: bytes, not FLOPs."""
    COMMUNICATION = "communication"
    """Of tp, cp and pp, as far as nothing is computed beneath it."""
    BUBBLE = "bubble"
    DATA_PARALLEL = "data_parallel"
    OPTIMIZER = "optimizer"


COMPUTE = (Kind.GEMM, Kind.ATTENTION, Kind.MEMORY_BOUND)


@dataclass(frozen=True, slots=True)
class Cost:
    """A leaf that takes so long, or parts one after another, all of them `times` times.

    Attributes:
        seconds: on the critical path; of a node with parts it is `times` their sum.
        low_s: the best that the uncertainty of the constants allows; `high_s` is the worst.
        hidden_s: what it takes beside that, beneath something that is counted elsewhere.
        efficiency: of a GEMM the share of the peak rate, of a collective that of the link.
        constants: names of the catalog's constants it depends on, to look their provenance up.
        note: a few words on what it is: a shape, a schedule, a reason.
        collectives: what moves, as the contract promises it.
    """

    name: str
    kind: Kind | None
    seconds: float
    low_s: float
    high_s: float
    hidden_s: float = 0.0
    efficiency: float | None = None
    constants: tuple[str, ...] = ()
    note: str = ""
    parts: tuple["Cost", ...] = ()
    times: float = 1.0
    collectives: tuple[Collective, ...] = ()

    @property
    def exposed_s(self) -> float:
        """How long communication is waited for, here and below."""
        waits = (Kind.COMMUNICATION, Kind.DATA_PARALLEL)
        return sum(seconds for kind, seconds in self.sum_by_kind().items() if kind in waits)

    def walk(self) -> Iterator[tuple["Cost", float]]:
        """This and every node below it, each with how often it happens."""
        yield self, 1.0
        for part in self.parts:
            yield from ((node, self.times * times) for node, times in part.walk())

    def sum_by_kind(self) -> Counter[Kind]:
        """Seconds of the leaves by kind; together they are `seconds`."""
        total: Counter[Kind] = Counter()
        for node, times in self.walk():
            if not node.parts and node.kind is not None:
                total[node.kind] += node.seconds * times  # type: ignore[assignment]  # counts seconds
        return total

    def find(self, name: str) -> "Cost":
        """The first node of that name.

        Raises:
            KeyError: there is none.
        """
        for node, _ in self.walk():
            if node.name == name:
                return node
        raise KeyError(name)

    def list_constants(self) -> tuple[str, ...]:
        """Every constant that this or anything below it depends on, once."""
        return tuple(dict.fromkeys(name for node, _ in self.walk() for name in node.constants))

    def count_collectives(self) -> Counter[Collective]:
        """Every collective here and below, and how often it is issued."""
        total: Counter[Collective] = Counter()
        for node, times in self.walk():
            for collective in node.collectives:
                total[collective] += round(times)
        return total


class Rest(TypedDict, total=False):
    """What a leaf may say beside its seconds, as in `Cost`."""

    hidden_s: float
    efficiency: float
    note: str
    collectives: tuple[Collective, ...]


def build_leaf(
    name: str, kind: Kind, seconds: float, uncertainty: float, constants: tuple[str, ...] = (), **rest: Unpack[Rest]
) -> Cost:
    """A leaf whose constants are uncertain by so large a share: `0.1` is a tenth either way."""
    low_s, high_s = seconds / (1 + uncertainty), seconds * (1 + uncertainty)
    return Cost(name, kind, seconds, low_s, high_s, constants=constants, **rest)


def join(name: str, parts: Iterable[Cost], *, times: float = 1.0, note: str = "") -> Cost:
    """Parts one after another, `times` times; what costs nothing is left out.

    Their errors have common causes (one derate, one clock), so the ends of the intervals are added, not their squares.
    """
    kept = tuple(part for part in parts if part.seconds or part.hidden_s)
    return Cost(
        name,
        None,
        times * sum(part.seconds for part in kept),
        times * sum(part.low_s for part in kept),
        times * sum(part.high_s for part in kept),
        hidden_s=times * sum(part.hidden_s for part in kept),
        note=note,
        parts=kept,
        times=times,
    )
