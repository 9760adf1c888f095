"""What a prediction of a server says: two times with their intervals, memory with its verdict, and what binds."""

from dataclasses import dataclass

from plait.config.model import ModelConfig
from plait.planner.assumed import CONTEXT_BYTES, LIBRARY_BYTES, MEMORY_MARGIN, find_constants
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost
from plait.planner.hardware import Constant
from plait.planner.inference.memory import InferenceMemory
from plait.planner.inference.server import Load, ServerConfig
from plait.planner.inference.term import Term
from plait.planner.prediction import Binding, Verdict
from plait.units import format_bytes


@dataclass(frozen=True, slots=True)
class InferencePrediction:
    """A server under a load.

    Attributes:
        server: with the mode in which prompts are read, even where it was left open.
        prefill: the tree of costs of reading `load.prefill_batch` prompts, up to their first token.
        decode: that of one further token of every request, at the average length of the context.
        prefill_terms: seconds by what would shorten them; together they are the time.
        weak: why this prediction deserves less trust than its interval says.
    """

    model: ModelConfig
    cluster: Cluster
    server: ServerConfig
    load: Load
    prefill: Cost
    decode: Cost
    prefill_terms: tuple[tuple[Term, float], ...]
    decode_terms: tuple[tuple[Term, float], ...]
    memory: InferenceMemory
    weak: tuple[str, ...] = ()

    @property
    def time_to_first_token_s(self) -> float:
        """From the prompts to their first tokens, of those that are read together and do not wait for others."""
        return self.prefill.seconds

    @property
    def time_per_output_token_s(self) -> float:
        """Between two tokens of a request."""
        return self.decode.seconds

    @property
    def answer_s(self) -> float:
        """From a prompt that is read at once to its last token, if no other prompt is read meanwhile."""
        return self.prefill.seconds + (self.load.generate_len - 1) * self.decode.seconds

    @property
    def batch_s(self) -> float:
        """From the first prompt of a batch to the last token of all its answers."""
        return self.load.num_prefills * self.prefill.seconds + (self.load.generate_len - 1) * self.decode.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens that one replica generates, its prompts read in between."""
        return self.load.batch * self.load.generate_len / self.batch_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """What a device contributes."""
        return self.tokens_per_s / self.server.tp

    @property
    def num_replicas(self) -> int:
        """Servers of this degree that the cluster has room for; each answers a load of its own."""
        return self.cluster.num_devices // self.server.tp

    @property
    def max_context_len(self) -> int:
        """Tokens that each request of the batch may have, of as many as the model has positions for."""
        return min(self.model.max_seq_len, self.memory.max_cached_tokens // self.load.batch)

    @property
    def prefill_binding(self) -> Binding:
        """What most of reading a prompt is spent on."""
        return _find_binding(self.prefill_terms, "the time to the first token")

    @property
    def decode_binding(self) -> Binding:
        """Memory if it does not fit, else what most of a generated token is spent on."""
        if self.memory.verdict is Verdict.DOES_NOT_FIT:
            lacking = format_bytes(-self.memory.margin_bytes)
            share = self.memory.total_bytes / self.memory.capacity_bytes
            return Binding("memory", share, f"the worst rank lacks {lacking}")
        return _find_binding(self.decode_terms, "the time per token")

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Everything that the prediction depends on, with its provenance."""
        names = (*self.prefill.list_constants(), *self.decode.list_constants())
        return (*find_constants(names, self.cluster.hardware), LIBRARY_BYTES, CONTEXT_BYTES, MEMORY_MARGIN)


def _find_binding(terms: tuple[tuple[Term, float], ...], what: str) -> Binding:
    term, seconds = max(terms, key=lambda pair: pair[1])
    share = seconds / sum(each for _, each in terms)
    return Binding(term, share, f"{share:.0%} of {what}")
