"""What a token-local module keeps of the one inside; its gradients are in tests/dist."""

import copy

import pytest
import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.contract.plan import Plan
from plait.errors import ShardingError
from plait.parallel.apply import parallelize
from plait.sharding import build_split
from tests.support.lone_mesh import build_lone_mesh


class Shift(nn.Module):
    """Everything that a module can hold, and a forward that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift + (10 * self.unsaved if self.training else 0)


def build() -> nn.Module:
    """The module on rank 0 of two, which hold a token each."""
    mesh = build_lone_mesh(2)
    mesh.tokens = build_split(2, 2)
    return parallelize(nn.ModuleDict({"norm": Shift()}), mesh, Plan({"norm": "token_local"}))


def test_state_dict_is_that_of_the_unsharded_model():
    assert list(build().state_dict()) == ["norm.weight", "norm.shift"]


def test_buffers_are_moved_and_loaded_with_the_parameters():
    model = build().double().eval()
    model.load_state_dict({"norm.weight": torch.full((3,), 3.0), "norm.shift": torch.full((3,), 5.0)})
    y = model["norm"](torch.ones(1, 3, dtype=torch.float64))
    assert torch.equal(y, torch.full((1, 3), 8.0, dtype=torch.float64))


def test_the_module_inside_is_in_the_same_mode():
    model, x = build(), torch.zeros(1, 3)
    assert torch.equal(model["norm"](x), torch.full((1, 3), 11.0))
    assert torch.equal(model.eval()["norm"](x), torch.ones(1, 3))
    assert torch.equal(model.train()["norm"](x), torch.full((1, 3), 11.0))


class Count(nn.Module):
    """Reads its parameters by name and all together, and counts its calls in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        self.calls = self.calls + 1
        (weight,) = self.parameters()
        assert weight is self.weight
        if fails:
            raise ValueError
        return x * weight


def test_the_module_inside_is_left_as_it_was(monkeypatch):
    """Its parameters stand for the twin's during a call only, also of one that fails; what it does to buffers stays."""
    mesh = build_lone_mesh(2)
    mesh.tokens = build_split(2, 2)
    summed = []
    monkeypatch.setattr(collectives, "all_reduce", lambda x, axis, **_: summed.append(x) or 2 * x)
    inside = Count()
    model = copy.deepcopy(parallelize(nn.ModuleDict({"norm": inside}), mesh, Plan({"norm": "token_local"})))
    model["norm"](torch.ones(1, 3)).sum().backward()
    assert torch.equal(model["norm"].weight.grad, torch.full((3,), 2.0))
    with pytest.raises(ValueError):  # noqa: PT011
        model["norm"](torch.ones(1, 3), fails=True)
    assert isinstance(model["norm"]._module[0].weight, nn.Parameter)
    assert torch.equal(model["norm"].calls, torch.full((1,), 2.0))
    assert torch.equal(inside.calls, torch.zeros(1))
    assert len(summed) == 1


def test_whole_tokens_are_refused():
    """FIELD 3.2, 3.8: every rank would have the whole gradient, and they would be summed."""
    with pytest.raises(ShardingError, match=r"norm: got 2 tokens \[2, 3\], but tp rank 0 holds 0:1 of 2"):
        build()["norm"](torch.ones(2, 3))


def test_whole_features_are_refused():
    """FIELD 3.2: a row linear takes the features of its rank."""
    model = parallelize(nn.ModuleDict({"down": nn.Linear(5, 3)}), build_lone_mesh(2, 1), Plan({"down": "row"}))
    with pytest.raises(ShardingError, match=r"down: input \[1, 5\] does not end in the 2 features of this rank"):
        model["down"](torch.ones(1, 5))
