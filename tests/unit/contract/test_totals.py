"""Totals of a step against closed formulas, written from the mathematics of the model, not from the contracts."""

from dataclasses import dataclass
from math import prod

import pytest

from plait.config.load import load_run_config
from plait.config.model import GptConfig
from plait.config.run import RunConfig
from plait.contract.report.training import StepTally, build_step_tally
from plait.contract.training import derive_run_model
from plait.sharding import Kind

CASES = [
    ("llama3-8b", "parallel.tp=4"),
    ("llama3-8b", "parallel.tp=4", "precision.reduce=float32", "train.seq_len=8191"),
    ("llama3-8b", "parallel.tp=16"),
    ("qwen-tiny", "parallel.tp=8", "parallel.dp_replicate=3", "train.seq_len=9"),
    (
        "llama-tiny-gqa2",
        "parallel.tp=3",
        "parallel.dp_replicate=2",
        "train.gradient_accumulation=3",
        "train.micro_batch_size=2",
    ),
    ("smollm2-135m", "parallel.tp=7", "train.seq_len=101", "precision.compute=float32"),
    ("gpt-tiny", "parallel.tp=3", "parallel.dp_replicate=2", "train.gradient_accumulation=3", "train.seq_len=7"),
    ("gpt2", "parallel.tp=5", "model.tied_embeddings=false", "model.attention_dropout=0.0"),
    ("gpt-22b", "parallel.tp=8", "train.micro_batch_size=4"),
    ("gpt-22b", "parallel.dp_replicate=8"),
    ("gpt-tiny", "parallel.tp=2", "parallel.dp_replicate=4"),
]


def share(size: int, degree: int, rank: int) -> int:
    """As even as can be, the first ranks taking one more."""
    return size // degree + (rank < size % degree)


def share_heads(num_heads: int, num_kv_heads: int, tp: int, rank: int) -> tuple[int, int, int]:
    """Query heads and KV heads of a rank, and how many ranks hold its KV heads."""
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv = share(num_kv_heads, tp, rank)
        return kv * group, kv, 1
    first = 0
    for head in range(num_kv_heads):
        members = share(tp, num_kv_heads, head)
        if rank < first + members:
            return share(group, members, rank - first), 1, members
        first += members
    raise AssertionError(rank)


@dataclass
class ByHand:
    """One rank of a run; sizes as in `plait.sharding`, a small letter for what the rank has of them."""

    run: RunConfig
    rank: int

    def __post_init__(self) -> None:
        model, tp = self.run.model, self.run.parallel.tp
        self.is_gpt = isinstance(model, GptConfig)
        self.T, self.D, self.L = self.run.tokens_per_micro_batch, model.width, model.num_layers
        self.t = share(self.T, tp, self.rank) if self.run.parallel.sequence_parallel else self.T
        self.f, self.v = share(model.mlp_width, tp, self.rank), share(model.vocab_size, tp, self.rank)
        self.heads, kv_heads, self.holders = share_heads(model.num_heads, model.num_kv_heads, tp, self.rank)
        self.q, self.kv = self.heads * model.head_width, kv_heads * model.head_width
        self.has_qkv_bias = isinstance(model, GptConfig) or model.qkv_bias
        self.element = {"bfloat16": 2, "float32": 4}[self.run.precision.compute]
        self.addend = {"bfloat16": 2, "float32": 4}[self.run.precision.reduce_dtype]
        self.weights = self.D * (2 * self.q + 2 * self.kv) + (2 if self.is_gpt else 3) * self.D * self.f

    def count_parameters(self) -> int:
        norm = self.D * (2 if self.is_gpt else 1)
        biases = (self.q + 2 * self.kv if self.has_qkv_bias else 0) + (2 * self.D + self.f if self.is_gpt else 0)
        tables = self.v * self.D * (1 if self.run.model.tied_embeddings else 2)
        positions = self.run.model.max_seq_len * self.D if self.is_gpt else 0
        return self.L * (self.weights + biases + 2 * norm) + norm + tables + positions

    def count_held_by_all(self) -> int:
        """Norms, what is added to sums, and learned positions, which every tp rank has."""
        norms = (2 * self.L + 1) * self.D * (2 if self.is_gpt else 1)
        added = (2 * self.L + self.run.model.max_seq_len) * self.D if self.is_gpt else 0
        return norms + added

    def count_flops(self) -> int:
        """Two for each weight and token, twice a head's width for each query and key; backward takes twice forward."""
        attention = 4 * self.T * self.run.seq_len * self.q
        forward = self.L * (2 * self.T * self.weights + attention) + 2 * self.T * self.D * self.v
        return 3 * forward * self.run.train.gradient_accumulation

    def count_block_bytes(self) -> int:
        """Inputs of two norms and of two groups of columns on own tokens; the rest on own features of all tokens."""
        model = self.run.model
        inside = 2 * (self.q + self.kv) + self.f * (2 if self.is_gpt else 3)
        scores = self.heads * self.T * self.run.seq_len
        is_unfused = isinstance(model, GptConfig) and model.attention_dropout > 0
        attention = scores * (2 * self.element + 1) if is_unfused else 4 * self.heads * self.T
        masks = 2 * self.t * self.D if isinstance(model, GptConfig) and model.dropout else 0
        return self.element * (4 * self.t * self.D + self.T * inside) + attention + masks

    def list_collectives(self) -> list[tuple[Kind, int, int]]:
        """Kind, bytes and degree of everything in a step."""
        tp, dp, model, T, D = self.run.parallel.tp, self.run.parallel.dp, self.run.model, self.T, self.D
        gather, scatter, reduce = Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE
        norms = 2 * self.L + 1
        if self.run.parallel.sequence_parallel:
            each = [(gather, T * D * self.element, tp)] * (6 * self.L + 3)
            each += [(scatter, T * D * self.addend, tp)] * (4 * self.L + 2)
            each += [(reduce, D * (2 if self.is_gpt else 1) * self.addend, tp)] * norms
            each += [(reduce, model.max_seq_len * D * self.addend, tp)] if self.is_gpt else []
        else:
            each = [(reduce, T * D * self.addend, tp)] * (4 * self.L + 2)
        each += [(reduce, 4 * T, tp), (reduce, 8 * T, tp)]
        shared = [self.kv * D, self.kv] if self.has_qkv_bias else [self.kv * D]
        each += [(reduce, size * self.addend, self.holders) for size in shared * 2 * self.L]
        once = [(gather, 24 * dp, dp), (reduce, 24, tp), (reduce, self.count_parameters() * self.addend, dp)]
        if dp > 2:
            once += [(reduce, 4 * self.count_held_by_all(), tp), (reduce, 8 * self.L * sum(shared), self.holders)]
        repeated = each * self.run.train.gradient_accumulation + [*once, (reduce, 4, tp)]
        return [collective for collective in repeated if collective[2] > 1]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_adds_up_to_what_is_counted_by_hand(case: tuple[str, ...], sequence_parallel: bool) -> None:
    mode = f"parallel.sequence_parallel={str(sequence_parallel).lower()}"
    run = load_run_config(case[0], [*case[1:], mode])
    for rank in range(run.parallel.tp):
        check_rank(build_step_tally(run, derive_run_model(run, rank)), ByHand(run, rank))


def check_rank(tally: StepTally, by_hand: ByHand) -> None:
    assert tally.num_parameters == by_hand.count_parameters()
    assert tally.flops == by_hand.count_flops()
    assert tally.block.saved_bytes == by_hand.count_block_bytes()
    collectives = by_hand.list_collectives()
    kinds = [kind for kind, _, _ in collectives]
    assert tally.collectives.counts == {kind: kinds.count(kind) for kind in set(kinds)}
    assert tally.collectives.payload_bytes == sum(payload for _, payload, _ in collectives)
    sent = sum(
        (2 if kind is Kind.ALL_REDUCE else 1) * payload * (degree - 1) / degree for kind, payload, degree in collectives
    )
    assert tally.collectives.sent_bytes == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt-22b"])
def test_what_is_kept_beside_the_blocks(model: str) -> None:
    """Ids and which are own, the last norm's and the head's input, logits, targets, and three numbers a token."""
    run = load_run_config(model, ["parallel.tp=4"])
    tally, by_hand = build_step_tally(run, derive_run_model(run, 1)), ByHand(run, 1)
    T, t, D = by_hand.T, by_hand.t, by_hand.D
    entry = 9 * T + (t * 8 + t * D if by_hand.is_gpt else 0)
    end = 2 * prod((2, t, D)) + 2 * T * by_hand.v + T * (8 + 4 + 2)
    assert tally.micro_batch.saved_bytes == by_hand.L * by_hand.count_block_bytes() + entry + end
