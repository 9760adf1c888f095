"""How collectives are hidden in the GEMMs beside them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from plait.config.section import Problem, Section

Policy = Literal["disabled", "mlp_only", "full", "auto"]
TransportName = Literal["auto", "ring", "symm_mem", "shm"]
MethodName = Literal["auto", "none", "bulk", "direct", "ring", "ring_two_way"]

SHORTHAND = "policy"
"""The key that a plain value stands for: `overlap = "full"` is short for `overlap.policy = "full"`."""

MAX_CHUNKS = 4096


def _check_chunks(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_CHUNKS
    if value != "auto" and not is_count:
        raise PydanticCustomError("chunks", f'should be "auto" or a whole number from 1 to {MAX_CHUNKS}')
    return value


class OverlapConfig(Section):
    """What is overlapped, and how; a plain `overlap = "full"` is short for `policy`."""

    policy: Policy = "disabled"
    """Overlap nothing, the MLPs, every collective beside a GEMM, or whichever pays by the cost model."""
    chunks: Annotated[Literal["auto"] | int, BeforeValidator(_check_chunks)] = "auto"
    """Into how many pieces each rank's rows are cut; `auto` asks the cost model for each GEMM."""
    transport: TransportName = "auto"
    """Point to point over torch.distributed (`ring`), symmetric memory of CUDA, or shared memory of CPUs."""
    method: MethodName = "auto"
    """In which order pieces travel; `none` is the library's collective, beside which nothing is computed."""
    strict: bool = False
    """Refuse to run where something else would run than what is asked for."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {SHORTHAND: value} if isinstance(value, str) else value

    @property
    def may_share_memory(self) -> bool:
        """Whether ranks of one host may move something through memory that they share."""
        return self.policy != "disabled" and self.transport in ("auto", "shm")

    @property
    def asked(self) -> str:
        """What is asked for, as on a command line without the key: `full chunks=4`."""
        named = {name: getattr(self, name) for name in ("method", "chunks", "transport")}
        return " ".join([self.policy, *(f"{name}={value}" for name, value in named.items() if value != "auto")])

    @property
    def is_asked_for(self) -> bool:
        """Whether the user said that something is to be overlapped; a default is not a wish."""
        return self.policy != "disabled" and "policy" in self.model_fields_set

    def conflicts(self) -> Iterator[Problem]:
        """What would have no effect."""
        if self.policy == "disabled" and "policy" not in self.model_fields_set:
            for name in sorted(self.model_fields_set):
                yield Problem(name, "nothing is overlapped unless policy says what", "add overlap=full")
        if self.method in ("none", "bulk") and self.chunks not in ("auto", 1):
            yield Problem(
                "chunks", f'method "{self.method}" moves whole tensors', 'leave it out, or use method "direct"'
            )
