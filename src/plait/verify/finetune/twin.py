"""The unsharded model, as transformers runs it: exact, in float64, and reordered, in the precision that is verified.

Its parameters are named as the directory names them. Nothing of ours computes in it but dropouts, whose masks are a
function of the token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.mesh import build_mesh
from plait.config.parallel import ParallelConfig
from plait.config.run import FineTuneConfig
from plait.contract.context.mask import AttentionMask
from plait.hf.stored import stored_of
from plait.parallel.context.tokens import list_document_positions
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.sharding import MeshShape
from plait.sharding.token_order import Order, build_order
from plait.train.build import load_directory
from plait.train.corpus.windows import IGNORE_INDEX
from plait.train.step import compute_hf_logits
from plait.verify.finetune.float64 import KeepFloat64
from plait.verify.finetune.weights import fill_weights, list_initial
from plait.verify.runtime.compare import Step
from plait.verify.runtime.reordering import apply_reordering
from plait.verify.runtime.twin import finish_step, sum_losses
from plait.verify.runtime.workload import Batch, build_batch


@dataclass(frozen=True)
class Twin:
    """What the unsharded model computes for a config: parameters by their names in the directory.

    Attributes:
        initial: all of them, as they are in the directory, or as adapters begin.
    """

    exact: Step
    reordered: Step
    initial: dict[str, Tensor]


def run_twin(config: FineTuneConfig) -> Twin:
    """Run one training step on the sequences of all ranks, exactly and reordered."""
    compute = getattr(torch, config.precision.compute)
    model = _load(config)
    initial = list_initial(model, _list_trained(model), config)
    fill_weights(model, {}, config)
    for param in model.parameters():
        param.data = param.data.to(compute).double()
    exact = _run_step(model, config)
    for param in model.parameters():
        param.data, param.grad = param.data.to(compute), None
    apply_reordering(model)
    reordered = _run_step(model, config)
    return Twin(exact, reordered, {_find_name(model, name): tensor for name, tensor in initial.items()})


def _load(config: FineTuneConfig) -> nn.Module:
    # Without documents: transformers keeps attention within them by itself, where positions begin anew.
    whole = config.model_copy(update={"parallel": ParallelConfig(), "data": None})
    model = load_directory(whole, build_mesh(MeshShape()))
    seed_dropout(model, config.seed)
    return model.train()


def _list_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _find_name(model: nn.Module, name: str) -> str:
    return stored_of(model)[name].name


def _compute_logits(model: nn.Module, batch: Batch) -> Tensor:
    if not batch.documents:
        return compute_hf_logits(model, batch.tokens)
    num_sequences, size = batch.tokens.shape
    mask, order = AttentionMask(documents=batch.documents), build_order(Order.CONTIGUOUS, size, 1)
    positions = list_document_positions(mask, num_sequences, order, 0)
    logits: Tensor = model(input_ids=batch.tokens, position_ids=positions, use_cache=False).logits
    return logits.flatten(0, 1)


def _run_step(model: nn.Module, config: FineTuneConfig) -> Step:
    batch = build_batch(config)
    set_dropout_offset(model, batch.first_token)
    with KeepFloat64():
        logits = _compute_logits(model, batch)
    loss = sum_losses(logits, batch.targets.flatten(), config.train)
    loss.backward()  # type: ignore[no-untyped-call]
    params = {_find_name(model, name): param for name, param in _list_trained(model).items()}
    num_targets = (batch.targets != IGNORE_INDEX).sum()
    return finish_step(params, logits.detach(), loss.detach(), num_targets, config.train)
