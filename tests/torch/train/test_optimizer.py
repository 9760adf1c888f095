import torch
from torch import nn

from plait.comm.mesh import build_mesh
from plait.config.train import TrainConfig
from plait.sharding import MeshShape
from plait.train.optimizer import AdamW, FlatGradients

CONFIG = TrainConfig(learning_rate=0.125, weight_decay=0.5, beta1=0.8, beta2=0.9)


def _build_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": nn.Parameter(torch.randn(6, 5, generator=generator)),
        "bias": nn.Parameter(torch.randn(6, generator=generator)),
    }


def _use(parameters: dict[str, nn.Parameter], x: torch.Tensor) -> None:
    out = x.to(parameters["weight"].dtype) @ parameters["weight"].T + parameters["bias"]
    out.square().sum().backward()


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    """In bfloat16 the small gradient of the second micro-batch would be lost beside the first."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    gradients = FlatGradients({"w": param})
    for factor in (256.0, 0.5, 0.25):
        (param * factor).sum().backward()
    assert gradients.flat.tolist() == [256.75] * 4
    assert param.grad is not None
    assert param.grad.data_ptr() == gradients.flat.data_ptr()


def test_gradients_start_a_step_from_zero_and_stay_views_of_one_tensor() -> None:
    parameters = _build_parameters()
    gradients = FlatGradients(parameters)
    for _ in range(2):
        gradients.zero()
        _use(parameters, torch.ones(3, 5))
        gradients.all_reduce(build_mesh(MeshShape()).dp)
        gradients.scale(0.5)
    expected = _build_parameters()
    _use(expected, torch.ones(3, 5))
    for name, param in expected.items():
        assert torch.equal(parameters[name].grad, param.grad / 2)  # type: ignore[arg-type,operator]


def test_biases_and_norm_weights_do_not_decay() -> None:
    """With zero gradients AdamW changes a parameter by its decay alone."""
    parameters, before = _build_parameters(), _build_parameters()
    FlatGradients(parameters)
    AdamW(parameters, torch.float32, CONFIG).step(0.125)
    assert torch.equal(parameters["bias"], before["bias"])
    assert torch.allclose(parameters["weight"], before["weight"] * (1 - 0.125 * 0.5), rtol=1e-6, atol=0)


def test_updates_smaller_than_bfloat16_can_see_are_kept_in_the_masters() -> None:
    """A step of 2**-12 on weights of 1 is below half a unit of bfloat16 (2**-8): without masters nothing would move."""
    param = nn.Parameter(torch.ones(8))
    config = CONFIG.model_copy(update={"weight_decay": 0.0})
    optimizer = AdamW({"w": param}, torch.bfloat16, config)
    gradients = FlatGradients({"w": param})
    assert param.dtype == torch.bfloat16
    for _ in range(64):
        gradients.zero()
        param.float().sum().backward()
        optimizer.step(2**-12)
    assert torch.allclose(optimizer.masters["w"], torch.full((8,), 1 - 64 * 2**-12), rtol=1e-6, atol=0)
    assert torch.equal(param, optimizer.masters["w"].bfloat16())
    assert param[0] == 1 - 2**-6


def test_moments_taken_to_another_optimizer_continue_bitwise() -> None:
    inputs = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(5))
    whole, first, second = (_build_parameters() for _ in range(3))
    optimizers = [AdamW(parameters, torch.float32, CONFIG) for parameters in (whole, first, second)]
    for parameters in (whole, first, second):
        FlatGradients(parameters)
    for step, x in enumerate(inputs):
        _step(whole, optimizers[0], x)
        if step < 3:
            _step(first, optimizers[1], x)
    with torch.no_grad():
        for name, param in second.items():
            param.copy_(first[name])
        for (_, _, target), (_, _, source) in zip(optimizers[2].moments(), optimizers[1].moments(), strict=True):
            target.copy_(source)
    optimizers[2].resume_at(3)
    for x in inputs[3:]:
        _step(second, optimizers[2], x)
    assert all(torch.equal(second[name], whole[name]) for name in whole)


def _step(parameters: dict[str, nn.Parameter], optimizer: AdamW, x: torch.Tensor) -> None:
    for param in parameters.values():
        assert param.grad is not None
        param.grad.zero_()
    _use(parameters, x)
    optimizer.step(0.01)
