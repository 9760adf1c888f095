"""A plain module of a user's own, with an explicit plan: an ordinary training loop equals that on a single device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait import KeyValueHeads, QueryHeads, gather_tensor, ownership_of

VOCAB, WIDTH, HEADS, HEAD_WIDTH, HIDDEN = 23, 12, 4, 3, 17
BATCH, SEQ_LEN, STEPS = 2, 5, 3

TOLERANCE = 1e-11
"""Relative, in float64: three steps of a two-block model, whose sums differ in order only."""


class Mixer(nn.Module):
    """Attention that knows nothing of plait: it infers its heads from what its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.key_value = nn.ModuleList(nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.project = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).view(BATCH, SEQ_LEN, -1, HEAD_WIDTH).transpose(1, 2) for linear in (self.query, *self.key_value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(0, 1).flatten(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.widen = nn.Linear(WIDTH, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, WIDTH)
        self.classify = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lookup(ids.flatten())
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.classify(x + self.narrow(F.silu(self.widen(x))))


def build_plan(sequence_parallel):
    heads = (HEADS, HEADS, HEAD_WIDTH)
    return plait.Plan(
        {
            "lookup": "vocab_embedding",
            "norms.*": "token_local",
            "mixers.*.query": plait.Column(QueryHeads(*heads)),
            "mixers.*.key_value.*": plait.Column(KeyValueHeads(*heads)),
            "mixers.*.project": plait.Row(QueryHeads(*heads)),
            "widen": "column",
            "narrow": "row",
            "classify": "vocab_head",
        },
        sequence_parallel=sequence_parallel,
    )


def train(model, mesh):
    """An ordinary loop; `mesh` is None on a single device."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=draw)
        targets = torch.randint(VOCAB, (BATCH * SEQ_LEN,), generator=draw)
        if mesh is None:
            loss = F.cross_entropy(model(ids), targets, label_smoothing=0.1)
        else:
            loss = plait.vocab_parallel_cross_entropy(model(ids), targets, mesh, vocab_size=VOCAB, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        clip = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if mesh is None else plait.clip_grad_norm_(model, 0.5)
        optimizer.step()
        history.append((loss.item(), clip.item()))
    return history


def build_network():
    torch.manual_seed(0)
    return Network().double()


def train_sharded(tp, sequence_parallel, from_device_mesh):
    device_mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)) if from_device_mesh else None
    given = device_mesh or plait.build_mesh(plait.MeshShape(tp=tp))
    model = plait.parallelize(build_network(), given, build_plan(sequence_parallel))
    mesh = plait.mesh_of(model)
    history = train(model, mesh)
    params = {name: model.get_parameter(name).detach() for name in ownership_of(model)}
    return history, {name: gather_tensor(params[name], own, mesh).numpy() for name, own in ownership_of(model).items()}


@pytest.mark.parametrize("from_device_mesh", [False, True], ids=["mesh", "device-mesh"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3])
def test_training_a_users_module_equals_single_device(ranks, tp, sequence_parallel, from_device_mesh):
    network = build_network()
    expected = train(network, None)
    assert len({loss for loss, _ in expected}) == STEPS
    for history, params in ranks(tp).call(
        train_sharded, tp=tp, sequence_parallel=sequence_parallel, from_device_mesh=from_device_mesh
    ):
        torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=TOLERANCE, atol=0)
        assert set(params) == set(dict(network.named_parameters()))
        for name, param in network.named_parameters():
            torch.testing.assert_close(torch.from_numpy(params[name]), param.detach(), rtol=TOLERANCE, atol=TOLERANCE)
