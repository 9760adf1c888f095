"""What a server needs on its worst rank: weights, keys and values of all requests, and one forward at work.

weights       what the rank owns, read from the contract: KV heads of which there are fewer than ranks on several
KV cache      K and V of the rank's own heads, for every token of every request
activations   the stream between blocks, the widest operation's inputs and outputs, and what moves, of the larger
              of the two forwards; nothing is kept for backward
logits        of the last token of each request, whole on every rank once they are gathered
libraries     the buffers of collectives; the device's context must be free beside (`judge`)
"""

from dataclasses import dataclass
from enum import StrEnum
from math import floor

from plait.config.model import ModelConfig
from plait.contract.step import list_moves
from plait.dtype import width_bytes
from plait.planner.assumed import CONTEXT_BYTES, DRAWN_LOGIT_BYTES, LIBRARY_BYTES, MEMORY_MARGIN
from plait.planner.inference.server import Load, ServerConfig
from plait.planner.memory.activations import derive_running_bytes
from plait.planner.memory.peak import judge
from plait.planner.planned import PlannedModel, count_bytes, derive_planned_model, is_attention, is_linear
from plait.planner.prediction import Verdict


class InferenceMemoryPart(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    KV_CACHE = "KV cache"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    LIBRARIES = "libraries"


@dataclass(frozen=True, slots=True)
class InferenceMemory:
    """Bytes on the worst rank of a server, by what they are for.

    Attributes:
        capacity_bytes: of one device.
        kv_bytes_per_token: of one token of one request, on this rank.
        max_cached_tokens: tokens whose keys and values have room if everything else stays, so that it still fits: the
            largest batch times context.
        max_batch: requests of this length that are answered together and still fit.
    """

    parts: tuple[tuple[InferenceMemoryPart, float], ...]
    capacity_bytes: float
    kv_bytes_per_token: float
    max_cached_tokens: int
    max_batch: int

    @property
    def total_bytes(self) -> float:
        """Everything that takes room on the device."""
        return sum(size for _, size in self.parts)

    @property
    def margin_bytes(self) -> float:
        """What is left of the capacity; where it is negative, what is lacking."""
        return self.capacity_bytes - self.total_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether there is room."""
        return judge(self.total_bytes, self.capacity_bytes)

    def bytes_of(self, part: InferenceMemoryPart) -> float:
        """Those for one purpose."""
        return dict(self.parts)[part]


def predict_inference_memory(
    model: ModelConfig, server: ServerConfig, load: Load, *, sequence_parallel: bool, capacity_bytes: float
) -> InferenceMemory:
    """Memory of tp rank 0, which has most where a cut is uneven."""
    prefill = derive_planned_model(
        model, server.build_plan(load.prefill_batch, sequence_parallel=sequence_parallel), load.prompt_len
    )
    decode = derive_planned_model(model, server.build_plan(load.batch, sequence_parallel=False), 1)
    need = _Need(
        weights=derive_weight_bytes(decode, server),
        libraries=LIBRARY_BYTES.value if server.tp > 1 else 0.0,
        prefill=_derive_forward_bytes(prefill, server),
        decode_per_request=_derive_forward_bytes(decode, server) / load.batch,
        logits_per_request=model.vocab_size * DRAWN_LOGIT_BYTES.value,
        kv_per_token=_derive_kv_bytes(decode) / load.batch,
    )
    room = (capacity_bytes - CONTEXT_BYTES.value) / MEMORY_MARGIN.value
    parts = need.list_parts(load)
    others = sum(parts.values()) - parts[InferenceMemoryPart.KV_CACHE]
    max_tokens = max(0, floor((room - others) / need.kv_per_token))
    return InferenceMemory(
        tuple(parts.items()), capacity_bytes, need.kv_per_token, max_tokens, need.find_max_batch(load, room)
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes that are there, and those of every request."""

    weights: float
    libraries: float
    prefill: float
    decode_per_request: float
    logits_per_request: float
    kv_per_token: float

    def list_parts(self, load: Load) -> dict[InferenceMemoryPart, float]:
        return {
            InferenceMemoryPart.WEIGHTS: self.weights,
            InferenceMemoryPart.KV_CACHE: self.kv_per_token * load.batch * load.context_len,
            InferenceMemoryPart.ACTIVATIONS: max(self.prefill, self.decode_per_request * load.batch),
            InferenceMemoryPart.LOGITS: load.batch * self.logits_per_request,
            InferenceMemoryPart.LIBRARIES: self.libraries,
        }

    def find_max_batch(self, load: Load, room: float) -> int:
        """Both forwards have to fit, whichever needs more."""
        free = room - self.weights - self.libraries
        each = self.kv_per_token * load.context_len + self.logits_per_request
        return max(0, floor(min((free - self.prefill) / each, free / (each + self.decode_per_request))))


def derive_weight_bytes(contract: PlannedModel, server: ServerConfig) -> float:
    """What the rank holds of the parameters; linears inside blocks with their scales if they are quantized."""
    width = width_bytes(server.precision.compute)
    numel = contract.config.num_layers * contract.block_parameters + contract.both_ends_parameters
    total = numel * width
    recipe = server.build_plan(1, sequence_parallel=False).recipe
    if recipe is None:
        return float(total)
    weights = [op.parameters for op in contract.block if is_linear(op)]
    quantized = [
        each.layout.local_numel(contract.setting.rank) for held in weights for each in held if len(each.dims) > 1
    ]
    saved = sum(numel * width - recipe.weight.row_bytes(numel) for numel in quantized)
    return float(total - contract.config.num_layers * saved)


def _derive_kv_bytes(contract: PlannedModel) -> float:
    """What a rank's own keys and values of the contract's tokens take, in all blocks."""
    cores = [op for op in contract.block if is_attention(op)]
    return float(contract.config.num_layers * sum(count_bytes(op.inputs[1:], contract) for op in cores))


def _derive_forward_bytes(contract: PlannedModel, server: ServerConfig) -> float:
    """The stream, beside the widest operation and the largest tensor that moves, before it does and after."""
    plan = server.build_plan(contract.setting.batch, sequence_parallel=contract.setting.sequence_parallel)
    payloads = [move.collective.payload_bytes for op in contract.block for move in list_moves(op.forward)]
    stream = contract.block[0].saved[0].num_bytes
    return stream + derive_running_bytes(contract, plan) + 2 * max(payloads, default=0)
