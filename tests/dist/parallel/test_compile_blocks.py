"""Whole parallel blocks under torch.compile: one graph for all that are alike, which moves what eager mode moves.

In float64: a compiler may fuse and so round otherwise between the operators, by less than `REORDERED`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from plait.comm.autograd import compiled
from plait.comm.autograd import redistribute
from plait.comm.autograd.compiled import Use
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.overlap import OverlapConfig
from plait.contract.collective import Collective
from plait.contract.model import Setting, derive_model, derive_plan
from plait.contract.plan import Column, Plan, Row
from plait.models.registry import build_model
from plait.parallel.apply import mesh_of, parallelize
from plait.parallel.block.compile import compile_forward
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.fsdp.apply import apply_fsdp
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.parallel.region import norm
from plait.parallel.tokens import shard_tokens
from tests.support.rank_pool import COMPILING_S
from plait.sharding import Invariant, KeyValueHeads, MeshShape, Partial, QueryHeads, Replicate, Shard, build_split

pytestmark = pytest.mark.timeout(COMPILING_S)

VOCAB = 33
SIZES = {"num_layers": 3, "width": 24, "vocab_size": VOCAB, "max_seq_len": 32}
MODELS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(num_heads=4, num_kv_heads=4, mlp_width=31, **SIZES),
    "llama-shared-kv": LlamaConfig(num_heads=4, num_kv_heads=1, mlp_width=31, qkv_bias=True, **SIZES),
    "gpt": GptConfig(num_heads=4, dropout=0.2, attention_dropout=0.1, **SIZES),
}
OVERLAPS = {
    "disabled": OverlapConfig(),
    "full": OverlapConfig(policy="full", transport="ring", method="direct", chunks=2),
}
REORDERED = 1e-13
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++, and there is no g++")


@dataclass(frozen=True)
class Step:
    """What a forward and backward gave: loss, every parameter's gradient, collectives."""

    tensors: list[Tensor]
    collectives: list[Collective]


def build(config: ModelConfig, *, sequence_parallel: bool, overlap: str) -> nn.Module:
    torch.manual_seed(0)
    mesh = build_mesh(MeshShape(tp=torch.distributed.get_world_size()))
    model = build_model(config).double()
    parallelize(model, mesh, derive_plan(config, sequence_parallel=sequence_parallel), overlap=OVERLAPS[overlap])
    seed_dropout(model, 3)
    return model


def run_step(model: nn.Module, tokens: Tensor, number: int) -> Step:
    model.zero_grad()
    set_dropout_offset(model, number * tokens.numel())
    with record() as trace:
        logits = model(tokens)
        loss = vocab_parallel_cross_entropy(logits, tokens.flatten(), mesh_of(model), vocab_size=VOCAB)
        loss.backward()
    return Step([loss.detach(), *(param.grad for param in model.parameters())], trace.collectives)


def check_equal(step: Step, eager: Step, tolerance: float = REORDERED) -> None:
    for tensor, expected in zip(step.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance)
    assert step.collectives == eager.collectives


def run_compiled_of_torchs_norms(**how: Any) -> int:
    """Eager mode too computes the RMSNorm that a compiler is given, which is torch's, and rounds as that does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "is_one_node", lambda *_: False)
        return run_compiled(**how)


def run_compiled(
    *, model: str, backend: str, sequence_parallel: bool, overlap: str, sizes: Sequence[tuple[int, int]]
) -> int:
    """The number of graphs that were compiled: of three layers, over a step for each of `sizes`, [B, S]."""
    torch._dynamo.reset()
    config = MODELS[model]
    eager, graph = (build(config, sequence_parallel=sequence_parallel, overlap=overlap) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    for layer in graph.layers:
        compile_forward(layer, backend=counter)
    for number, (batch, seq_len) in enumerate(sizes):
        tokens = torch.arange(batch * seq_len).view(batch, seq_len) * 7 % VOCAB
        step = run_step(graph, tokens, number)
        check_equal(step, run_step(eager, tokens, number), REORDERED if backend == "inductor" else 0)
        mesh = mesh_of(graph)
        place = (batch, seq_len, mesh.tp.degree, mesh.tp.rank)
        setting = Setting(*place, sequence_parallel=sequence_parallel, dtype="float64")
        promised = derive_model(config, setting).micro_batch_collectives
        assert step.collectives == list(promised)
    torch._dynamo.reset()
    return counter.frame_count


@pytest.mark.parametrize(
    ("model", "tp", "sequence_parallel", "overlap"),
    [
        ("llama", 2, True, "full"),
        ("llama", 2, False, "disabled"),
        ("llama-shared-kv", 3, True, "disabled"),
        ("gpt", 3, True, "full"),
        ("gpt", 2, True, "disabled"),
        ("gpt", 2, False, "full"),
    ],
)
def test_layers_are_one_graph_that_gives_the_bits_of_eager_mode(compiling_ranks, model, tp, sequence_parallel, overlap):
    """Two numbers of tokens, so two graphs, whatever key, position and name a layer has."""
    graphs = compiling_ranks(tp).call(
        run_compiled_of_torchs_norms,
        model=model,
        backend="aot_eager",
        sequence_parallel=sequence_parallel,
        overlap=overlap,
        sizes=[(1, 11), (2, 6), (1, 11), (1, 11)],
    )
    assert graphs == [2] * tp


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("model", "sequence_parallel", "overlap"), [("gpt", True, "full"), ("llama-shared-kv", False, "disabled")]
)
def test_kernels_that_a_compiler_makes_of_layers_give_what_eager_mode_gives(compiling_ranks, model, sequence_parallel, overlap):
    """In float64, where fusing rounds otherwise, by `REORDERED`; one graph, as compiling takes its time."""
    graphs = compiling_ranks(2).call(
        run_compiled,
        model=model,
        backend="inductor",
        sequence_parallel=sequence_parallel,
        overlap=overlap,
        sizes=[(1, 11), (1, 11)],
    )
    assert graphs == [1] * 2


def run_sharded() -> int:
    """A step of blocks whose parameters are shared out, compiled and not: the number of graphs."""
    torch._dynamo.reset()
    counter, steps = CompileCounterWithBackend("aot_eager"), []
    for is_compiled in (False, True):
        mesh = build_mesh(MeshShape(dp_shard=2))
        torch.manual_seed(0)
        model = parallelize(build_model(MODELS["gpt"]).double(), mesh, derive_plan(MODELS["gpt"]))
        seed_dropout(model, 3)
        for layer in model.layers if is_compiled else ():
            compile_forward(layer, backend=counter)
        apply_fsdp(model, mesh, compute=torch.float64, reshard_after_forward=True)
        for number in range(2):
            model.zero_grad()
            set_dropout_offset(model, 22 * number)
            with record() as trace:
                tokens = (torch.arange(22).view(2, 11) * 7 + mesh.rank) % VOCAB
                loss = vocab_parallel_cross_entropy(model(tokens), tokens.flatten(), mesh, vocab_size=VOCAB)
                loss.backward()
            tensors = [loss.detach(), *(param.grad.to_local() for param in model.parameters())]
            steps.append(Step(tensors, trace.collectives))
    for eager, graph in zip(steps[:2], steps[2:], strict=True):
        check_equal(graph, eager, 0)
    return counter.frame_count


def test_blocks_whose_parameters_are_shared_out_compile(compiling_ranks):
    """Parameters are gathered and gradients scattered around the one graph."""
    assert compiling_ranks(2).call(run_sharded) == [1, 1]


class Block(nn.Module):
    """Somebody's: how many heads there are follows from what the projections return."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(24), nn.LayerNorm(24)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(24, width) for width in (24, 12, 12, 24))
        self.gate, self.up, self.down = nn.Linear(24, 31), nn.Linear(24, 31), nn.Linear(31, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, 6)).transpose(0, 1)[None] for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y[0].transpose(0, 1).flatten(1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def parallelize_block(*, sequence_parallel: bool) -> nn.Module:
    torch.manual_seed(0)
    queries, keys = QueryHeads(4, 2, 6), KeyValueHeads(4, 2, 6)
    roles = {
        "wq": Column(queries, group="qkv"),
        "wk": Column(keys, group="qkv"),
        "wv": Column(keys, group="qkv"),
        "wo": Row(queries),
        "gate": Column(group="mlp"),
        "up": Column(group="mlp"),
        "down": "row",
        "*_norm": "token_local",
    }
    mesh = build_mesh(MeshShape(tp=torch.distributed.get_world_size()))
    plan = Plan(roles, sequence_parallel=sequence_parallel)
    return parallelize(Block().double(), mesh, plan, overlap=OVERLAPS["full"])


def run_block(*, sequence_parallel: bool, is_checkpointed: bool) -> None:
    torch._dynamo.reset()
    block = parallelize_block(sequence_parallel=sequence_parallel)
    graph = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    steps = []
    for forward in (graph, block):
        block.zero_grad()
        x = torch.linspace(-1, 1, 11 * 24, dtype=torch.float64).view(11, 24).requires_grad_()
        with record() as trace:
            own = shard_tokens(x, mesh_of(block)) if sequence_parallel else x
            y = checkpoint(forward, own, use_reentrant=False) if is_checkpointed else forward(own)
            y.square().sum().backward()
        steps.append(Step([y.detach(), x.grad, *(param.grad for param in block.parameters())], trace.collectives))
    check_equal(*steps)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
def test_a_block_of_a_user_compiles(compiling_ranks, sequence_parallel, is_checkpointed):
    compiling_ranks(2).call(run_block, sequence_parallel=sequence_parallel, is_checkpointed=is_checkpointed)


TRANSITIONS = [
    (Invariant(), Replicate(), (3, 5)),
    (Partial(), Invariant(), (3, 5)),
    (Partial(), Shard(1), (3, 5)),
    (Invariant(), Shard(1), (3, 5)),
    (Shard(1), Replicate(), None),
    (Shard(1), Invariant(), None),
]


def run_transitions() -> None:
    torch._dynamo.reset()
    axis, split = build_mesh(MeshShape(tp=2)).tp, build_split(5, 2)
    for source, target, shape in TRANSITIONS:
        x = torch.randn(shape or (3, split.lengths[axis.rank]), dtype=torch.float64).requires_grad_()

        def move(x: Tensor, source=source, target=target) -> Tensor:
            return redistribute(x, axis, source, target, split=split) * 2

        results = []
        for forward in (torch.compile(move, fullgraph=True, backend="aot_eager"), move):
            with record() as trace:
                y = forward(x)
                (grad,) = torch.autograd.grad(y.sin().sum(), x)
            results.append(Step([y.detach(), grad], trace.collectives))
        check_equal(*results)


def test_transitions_compile(compiling_ranks):
    compiling_ranks(2).call(run_transitions)


def run_opcheck() -> None:
    axis = build_mesh(MeshShape(tp=2)).tp
    params = [torch.randn(3).requires_grad_(), torch.randn(2, 2).requires_grad_()]
    use = Use(axis, "norm")
    opcheck(compiled.use_on_own_tokens, (params, use.handle))
    x = torch.randn(2, 3).requires_grad_()
    # Partial -> Invariant
    opcheck(compiled.redistribute, (x, axis.handle, [2, 0, 0, 0], [], [], [2, 3]))


def test_operators_are_in_good_order(compiling_ranks):
    """torch runs them with and without a compiler and compares shapes, strides and gradients with what they declare."""
    compiling_ranks(2).call(run_opcheck)
