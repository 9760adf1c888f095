"""What users do with a model whose collectives are overlapped: copy it, evaluate it, feed it the wrong thing."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm.mesh import Mesh, build_mesh
from plait.config.overlap import OverlapConfig
from plait.errors import ShardingError
from plait.overlap import collective_matmul
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.site import Pass, Site
from plait.overlap.transport.pool import Pool
from plait.parallel.apply import parallelize, record_of
from plait.schedule.work import Operation
from plait.sharding import MeshShape, Replicate, Shard, derive_transition

PATIENCE_S = 10.0


class Gated(nn.Module):
    """A gated MLP that may write to its gate before the activation reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8)
        self.up = nn.Linear(6, 8)
        self.activation = plait.SwiGLU()
        self.down = nn.Linear(8, 6)
        self.shift: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.shift is not None:
            gate += self.shift
        return self.down(self.activation(gate, up))


PLAN = plait.Plan(
    {
        "gate": plait.Column(group="gate_up"),
        "up": plait.Column(group="gate_up"),
        "activation": plait.Activation(group="gate_up"),
        "down": "row",
    }
)


def build(transport: str) -> tuple[nn.Module, nn.Module, Mesh]:
    """A model, the same unsharded, and the mesh."""
    torch.manual_seed(0)
    mesh, model = build_mesh(MeshShape(tp=2)), Gated().double()
    whole = copy.deepcopy(model)
    config = OverlapConfig(policy="full", transport=transport, method="direct", chunks=2)
    return parallelize(model, mesh, PLAN, overlap=config), whole, mesh


def run(model: nn.Module, mesh: Mesh | None) -> list[Tensor]:
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
    y = model(x if mesh is None else plait.shard_tokens(x, mesh))
    return y if mesh is None else plait.gather_tokens(y, mesh)


def live(transport: str) -> None:
    model, whole, mesh = build(transport)
    with torch.inference_mode():
        torch.testing.assert_close(run(model, mesh), run(whole, None))
    run(model, mesh).square().sum().backward()
    run(whole, None).square().sum().backward()
    torch.testing.assert_close(model.down.bias.grad, whole.down.bias.grad)
    for shift in (0.5, None):
        model.shift = whole.shift = shift
        with torch.no_grad():
            torch.testing.assert_close(run(model, mesh), run(whole, None))
    torch.testing.assert_close(run(copy.deepcopy(model), mesh), run(model, mesh))


@pytest.mark.parametrize("transport", ["ring", "shm"])
def test_a_model_is_evaluated_trained_written_to_and_copied(ranks, transport):
    """An activation that is ready is not taken for that of a gate which was written to since."""
    ranks(2).call(live, transport=transport)


def feed_other_dtype(is_compiled: bool) -> None:
    model, _, mesh = build("ring")
    x = plait.shard_tokens(torch.ones(7, 6), mesh)
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    with pytest.raises(ShardingError, match=r"gate_up: input \[\d, 6\] is torch.float32, the weight .* torch.float64"):
        forward(x)
    for name, where in (("up", "gate_up"), ("down", "down")):
        linear = getattr(model, name)
        linear.bias.data = linear.bias.data.float()
        with pytest.raises(ShardingError, match=rf"{where}: input .* torch.float64, the bias \[\d\] is torch.float32"):
            forward(x.double())
        linear.bias.data = linear.bias.data.double()
    torch._dynamo.reset()
    run(model, mesh).sum().backward()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_operands_of_two_dtypes_are_refused_before_anything_is_sent(ranks, is_compiled):
    ranks(2).call(feed_other_dtype, is_compiled=is_compiled)


def test_a_buffer_that_inference_took_first_can_be_written_by_training():
    pool = Pool()
    with torch.inference_mode():
        buffer = pool.take(2, 3, torch.float32, torch.device("cpu"))
    pool.give_back(buffer)
    pool.take(2, 3, torch.float32, torch.device("cpu")).zero_()


def forget(transport: str) -> int:
    """How many models that were trained are still there when nobody holds them."""
    model, _, mesh = build(transport)
    matmul = weakref.ref(record_of(model).matmul)
    run(model, mesh).sum().backward()
    run(model, mesh)
    del model, mesh, _
    deadline_s = time.monotonic() + PATIENCE_S
    while gc.collect() >= 0 and matmul() is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)  # a thread of gloo may not have come to letting go of the last message
    return int(matmul() is not None)


@pytest.mark.parametrize("transport", ["ring", "shm"])
def test_a_model_that_nobody_holds_is_gone(ranks, transport):
    """What a transport keeps from run to run leads to no graph, and so to no model."""
    assert ranks(2).call(forget, transport=transport) == [0, 0]


def feed_ever_new_sizes(transport: str) -> tuple[int, int, int]:
    mesh = build_mesh(MeshShape(tp=2))
    config = OverlapConfig(policy="full", method="direct", transport=transport)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_matmul, "_MAX_PASSES", 6)
        matmul = CollectiveMatmul(mesh, config)
        transition = derive_transition(Shard(0), Replicate())
        for num_rows in (*range(2, 40, 2), 2, 38, 4):
            what = Pass(Operation.COLUMN_FORWARD, Site("here", "mlp", 3, 4, "float32"), transition, num_rows)
            shard = torch.full((num_rows // 2, 3), float(mesh.tp.rank))
            outcome = matmul.run(what, gemms={"forward": lambda *_, **__: None}, shard=shard)
            assert outcome.full is not None
            assert outcome.full.sum() == 3 * num_rows // 2
    return len(matmul.chosen), len(matmul.receipt.lines), matmul.receipt.num_dropped


@pytest.mark.parametrize("transport", ["ring", "shm"])
def test_batches_of_ever_new_sizes_fill_no_memory(ranks, transport):
    assert ranks(2).call(feed_ever_new_sizes, transport=transport) == [(6, 6, 15)] * 2
