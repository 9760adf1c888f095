"""Hugging Face models under a precision recipe give over several ranks what they give on one, in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from plait.comm.mesh import Mesh, build_mesh
from plait.config.quantization import QuantizationConfig
from plait.hf.parallelize import parallelize
from plait.parallel.apply import ownership_of, record_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.quant import scheme
from plait.verify.finetune.float64 import KeepFloat64
from plait.sharding import MeshShape
from tests.support.adapters import build_adapted
from tests.support.architectures import build_model, draw_ids
from tests.support.lone_mesh import build_lone_mesh

TOLERANCE = 1e-9
"""Of float64 sums in another order, through two layers; one number in another code shows as 1e-5 and more."""

BLOCKS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
"""Blocks of 32, three columns of them in the MLP."""


@contextmanager
def _keep_float64() -> Iterator[None]:
    """As `KeepFloat64`, but quantizers see float32 as ever."""

    def hide(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)

        return run

    names = ("quantize", "measure_amax", "derive_scale")
    hidden = {name: hide(getattr(scheme, name)) for name in names}
    with KeepFloat64(), patch.multiple(scheme, **hidden):
        yield


def _build(name: str, mesh: Mesh, recipe: str, *, sequence_parallel: bool, adapted: bool = False, **config: Any) -> Any:
    quantization = QuantizationConfig(recipe=recipe, keep_first=0, keep_last=0)  # type: ignore[arg-type]
    model = (build_adapted if adapted else build_model)(name, **config)
    model = parallelize(model, mesh, quantization=quantization, sequence_parallel=sequence_parallel)
    seed_dropout(model, 1)
    set_dropout_offset(model, 0)
    return model


def _run(model: Any, mesh: Mesh, ids: Tensor) -> dict[str, Tensor]:
    with _keep_float64():
        output = model(ids, labels=ids, use_cache=False, gather_logits=True)
    output.loss.backward()
    ownership = ownership_of(model)
    grads = {
        name: gather_tensor(param.grad, ownership[name], mesh)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return {"logits": output.logits.detach(), **grads}


def run_parity(*, name: str, tp: int, recipe: str, sequence_parallel: bool, **config: Any) -> tuple[float, int]:
    """The largest difference, relative to the largest number of a tensor, and how many linears are quantized."""
    mesh, lone = build_mesh(MeshShape(tp=tp)), build_lone_mesh(1)
    ids = draw_ids(2, 16)
    found = _run(_build(name, mesh, recipe, sequence_parallel=sequence_parallel, **config), mesh, ids)
    twin = _build(name, lone, recipe, sequence_parallel=False, **config)
    wanted = _run(twin, lone, ids)
    assert found.keys() == wanted.keys()
    record = record_of(twin)
    assert record is not None
    assert record.precision is not None
    worst = max(float((found[key] - each).abs().max() / each.abs().max()) for key, each in wanted.items())
    return worst, len(record.precision.recipes)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize(("name", "linears"), [("llama", 14), ("phi3", 14), ("gpt2", 12), ("gpt_neox", 8)])
@pytest.mark.parametrize("tp", [2, 3])
def test_architectures(ranks, name, linears, tp, sequence_parallel):
    """Packed linears are quantized in parts, at every degree."""
    recipe = "fp8_currentscaling"
    for worst, count in ranks(tp).call(
        run_parity, name=name, tp=tp, recipe=recipe, sequence_parallel=sequence_parallel
    ):
        assert worst < TOLERANCE
        assert count == linears


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayedscaling"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_recipes(ranks, recipe, kv_heads):
    """Also where KV heads are shared: the gradients of their outputs are whole before they are quantized."""
    config = {**BLOCKS, "num_key_value_heads": kv_heads}
    for worst, _ in ranks(2).call(run_parity, name="llama", tp=2, recipe=recipe, sequence_parallel=True, **config):
        assert worst < TOLERANCE


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_adapters_read_what_quantized_linears_read(ranks, name, sequence_parallel):
    """They themselves stay as they are; on one rank too they see the quantized input of their region."""
    for worst, count in ranks(2).call(
        run_parity, name=name, tp=2, recipe="fp8_currentscaling", sequence_parallel=sequence_parallel, adapted=True
    ):
        assert worst < TOLERANCE
        assert count == 14
