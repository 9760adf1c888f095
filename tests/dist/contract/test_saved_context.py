"""What a rank keeps for backward over a context axis, read off the tensors that autograd saves, is what is promised."""

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import plait
from plait.comm.launch import LocalRanks
from plait.config.axis.context import ContextConfig
from plait.config.model import GptConfig, LlamaConfig
from plait.contract.context.attention import ContextMethod
from plait.contract.context.sequences import Sequences
from plait.contract.model import derive_model, derive_plan
from plait.contract.setting import Setting
from plait.models.registry import build_model
from plait.parallel.apply import parallelize
from plait.sharding.token_order import Order, build_order
from tests.dist.contract.test_saved_bytes import BATCH, MODELS, SEQ_LEN, _list_uncounted_bytes

SHAPE = plait.MeshShape(cp=2, tp=2)


def measure(config: GptConfig | LlamaConfig, method: str, order: str) -> int:
    """Bytes of the tensors that autograd holds between forward and backward, each once, without parameters."""
    mesh = plait.build_mesh(SHAPE)
    context = ContextConfig(method=method, order=order)  # type: ignore[arg-type]
    model = parallelize(build_model(config), mesh, derive_plan(config), context=context)
    plait.seed_dropout(model, 0)
    plait.set_dropout_offset(model, 0)
    plait.enter_sequences(model, SEQ_LEN)
    whole = (torch.arange(BATCH * SEQ_LEN) % config.vocab_size).view(BATCH, SEQ_LEN)
    tokens = plait.take_own_tokens(whole, mesh)
    held: dict[tuple[int, int], torch.Tensor] = {}
    """By storage and where in it: the heads that come together in an exchange are kept as parts of one."""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr(), tensor.storage_offset()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(tokens)
        loss = plait.vocab_parallel_cross_entropy(logits, tokens.flatten(), mesh, vocab_size=config.vocab_size)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(tensor.nbytes for (where, _), tensor in held.items() if where not in parameters)
    loss.backward()
    return saved


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("method", list(ContextMethod))
@pytest.mark.parametrize("model_name", ["fused attention", "grouped queries and gated MLP"])
def test_autograd_keeps_what_the_contract_says(
    ranks: Callable[[int], LocalRanks], model_name: str, method: ContextMethod, order: Order
) -> None:
    """To the byte: of seven tokens one context rank has four, the other three, of three sequences, cut again over tp."""
    config = MODELS[model_name]
    measured = ranks(4).call(measure, config=config, method=str(method), order=str(order))
    dealt = build_order(order, SEQ_LEN, SHAPE.cp)
    for rank in range(4):
        place = SHAPE.coordinates(rank)
        setting = Setting(
            BATCH, SEQ_LEN, SHAPE.tp, place.tp, dtype="float32",
            sequences=Sequences(dealt, place.cp), context_method=method,
        )  # fmt: skip
        promised = sum(op.saved_bytes for op in derive_model(config, setting).ops)
        uncounted = _list_uncounted_bytes(config, setting.token_split.lengths[place.tp], setting.num_own_tokens)
        assert measured[rank] == promised + sum(uncounted)
