"""What a token-local module keeps of the one inside; its gradients are in tests/dist."""

import torch
from torch import Tensor, nn

from plait.contract.plan import Plan
from plait.parallel.apply import parallelize
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
    return parallelize(nn.ModuleDict({"norm": Shift()}), build_lone_mesh(2), Plan({"norm": "token_local"}))


def test_state_dict_is_that_of_the_unsharded_model():
    assert list(build().state_dict()) == ["norm.weight", "norm.shift"]


def test_buffers_are_moved_and_loaded_with_the_parameters():
    model = build().double().eval()
    model.load_state_dict({"norm.weight": torch.full((3,), 3.0), "norm.shift": torch.full((3,), 5.0)})
    y = model["norm"](torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(y, torch.full((2, 3), 8.0, dtype=torch.float64))


def test_the_module_inside_is_in_the_same_mode():
    model, x = build(), torch.zeros(1, 3)
    assert torch.equal(model["norm"](x), torch.full((1, 3), 11.0))
    assert torch.equal(model.eval()["norm"](x), torch.ones(1, 3))
    assert torch.equal(model.train()["norm"](x), torch.full((1, 3), 11.0))
