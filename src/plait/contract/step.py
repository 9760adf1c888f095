"""The steps an operation takes, in order of issue: GEMMs, collectives, messages; what is elementwise is left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.contract.collective import Collective
from plait.contract.parameter import Parameter
from plait.contract.setting import Setting, Tensor
from plait.dtype import DType, width_bytes
from plait.sharding import Invariant, Kind, Partial, Shard, Transition, derive_transition

REDUCE = derive_transition(Partial(), Invariant()).forward
"""The collective that turns addends into their sum, the same on every rank."""


@dataclass(frozen=True)
class Gemm:
    """`count` products `[m, k] @ [k, n]` of one rank; `what` is forward, dgrad or wgrad."""

    name: str
    what: str
    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of the product space."""
        return 2 * self.m * self.k * self.n * self.count

    def moved_bytes(self, dtype: DType) -> int:
        """Bytes that cross memory if each operand and the result do so once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.count * width_bytes(dtype)

    def intensity(self, dtype: DType) -> float:
        """Arithmetic intensity in FLOP per byte; 0 where there is nothing to do."""
        moved = self.moved_bytes(dtype)
        return self.flops / moved if moved else 0.0


@dataclass(frozen=True)
class Move:
    """A collective and which tensor it carries, whole: `all_gather x [T, D]`."""

    tensor: str
    dims: tuple[str, ...]
    collective: Collective

    @property
    def act(self) -> str:
        """What is done: the kind of the collective."""
        return self.collective.kind

    @property
    def payloads(self) -> tuple[int, ...]:
        """Bytes that it carries."""
        return (self.collective.payload_bytes,)

    def __str__(self) -> str:
        return f"{self.act} {self.tensor} [{', '.join(self.dims)}]"


@dataclass(frozen=True)
class Messages:
    """What goes from rank to rank of an axis without being a collective: `send k, v [S/cp, 2, B, K, H]`.

    Attributes:
        dims: of one message.
        sent: bytes of each that this rank sends.
        received: of each that it receives.
    """

    tensor: str
    dims: tuple[str, ...]
    axis: str
    dtype: DType
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def act(self) -> str:
        """What is done: `recv` on a rank that sends none."""
        return "send" if self.sent else "recv"

    @property
    def payloads(self) -> tuple[int, ...]:
        """Bytes of each."""
        return self.sent or self.received

    @property
    def sent_bytes(self) -> int:
        """What this rank sends."""
        return sum(self.sent)

    def __str__(self) -> str:
        return f"{self.act} {self.tensor} [{', '.join(self.dims)}]"


Step = Gemm | Move | Messages


def derive_moves(setting: Setting, name: str, transition: Transition, tensor: Tensor) -> tuple[Move, ...]:
    """The collective that takes `name`, shaped as `tensor`, through `transition`; none where nothing moves."""
    kind = transition.forward
    if not kind.is_collective or setting.tp == 1:
        return ()
    cut = transition.source if kind is Kind.ALL_GATHER else transition.target
    dim = cut.dim if isinstance(cut, Shard) else 0
    dtype = setting.sum_dtype if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) else setting.dtype
    layout = tensor.layout
    return (Move(name, layout.dims, Collective(kind, "tp", setting.tp, layout.shape, dtype, dim)),)


def derive_replica_sum(setting: Setting, name: str, parameter: Parameter) -> tuple[Move, ...]:
    """The all-reduce of the gradient of a parameter that several ranks hold, over the subgroup of this rank."""
    own = parameter.ownership
    degree = 1 if own.split is None else len(own.split.replicas(setting.rank))
    if own.reduced_over is None or degree == 1:
        return ()
    shape = own.local_shape(setting.rank)
    return (Move(name, parameter.dims, Collective(REDUCE, own.reduced_over, degree, shape, setting.sum_dtype)),)


def derive_token_sum(setting: Setting, parameters: Sequence[Parameter]) -> tuple[Move, ...]:
    """The one all-reduce of all gradients of a module of which each rank saw only its own tokens."""
    summed = [parameter for parameter in parameters if parameter.ownership.reduced_over == "tp"]
    if not summed or setting.tp == 1:
        return ()
    dims = "+".join("*".join(parameter.dims) for parameter in summed)
    numel = sum(parameter.layout.local_numel(setting.rank) for parameter in summed)
    return (Move("dw", (dims,), Collective(REDUCE, "tp", setting.tp, (numel,), setting.sum_dtype)),)


def list_gemms(steps: Iterable[Step]) -> list[Gemm]:
    """The GEMMs among `steps`."""
    return [step for step in steps if isinstance(step, Gemm)]


def list_moves(steps: Iterable[Step]) -> list[Move]:
    """The collectives among `steps`, with what they carry."""
    return [step for step in steps if isinstance(step, Move)]


def list_messages(steps: Iterable[Step]) -> list[Messages]:
    """The messages among `steps`, by what they carry."""
    return [step for step in steps if isinstance(step, Messages)]


def list_moved(steps: Iterable[Step]) -> list[Move | Messages]:
    """Collectives and messages among `steps`: all that is not computed."""
    return [step for step in steps if not isinstance(step, Gemm)]


def list_collectives(steps: Iterable[Step]) -> list[Collective]:
    """The collectives among `steps`, as a trace records them."""
    return [move.collective for move in list_moves(steps)]


def sum_flops(steps: Iterable[Step]) -> int:
    """FLOPs of the GEMMs among `steps`."""
    return sum(gemm.flops for gemm in list_gemms(steps))
