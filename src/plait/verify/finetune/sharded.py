"""One step of the trainer of a directory on one rank, looked at while it is taken."""

from dataclasses import dataclass

import torch

from plait.comm.mesh import build_mesh
from plait.config.run import FineTuneConfig
from plait.contract.axis.directory import Owned
from plait.hf.stored import Stored, stored_of
from plait.overlap.receipt import check_strict
from plait.parallel.apply import ownership_of, record_of
from plait.train.build import build_trainer
from plait.verify.finetune.weights import fill_weights, list_initial
from plait.verify.runtime.pieces import Pieces
from plait.verify.runtime.recipe import FIRST
from plait.verify.runtime.sharded import Passes, RankResult, Watched, add_parameters, list_local


@dataclass(frozen=True)
class DirectoryResult(RankResult):
    """What a rank sends back beside the file of its tensors.

    Attributes:
        stored: where in the directory each parameter of the rank is.
        owned: who owns what of each.
    """

    stored: dict[str, Stored]
    owned: dict[str, Owned]


def run_sharded(config: FineTuneConfig, folder: str) -> DirectoryResult:
    """Run on every rank of the mesh; tensors go to `folder`."""
    pieces, reduce_dtype = Pieces(), getattr(torch, config.precision.reduce_dtype)
    mesh = build_mesh(config.parallel.mesh_shape, reduce_dtype=reduce_dtype)
    trainer = build_trainer(config, mesh)
    model, record_of_model = trainer.model, record_of(trainer.model)
    assert record_of_model is not None
    passes = Passes(record_of_model.matmul)
    if passes.matmul is not None:
        passes.matmul.instrument = passes
    masters = trainer.optimizer.masters
    add_parameters(pieces, "initial", model, list_initial(model, masters, config))
    fill_weights(model, masters, config)
    trainer.optimizer.apply_masters()
    trace = Watched(config, trainer, pieces).step(FIRST)
    add_parameters(pieces, "update", model, list_local(trainer))
    pieces.save(folder, mesh.rank)
    if passes.receipt is not None and config.overlap.strict:
        check_strict(passes.receipt)
    trained = set(trainer.optimizer.parameters)
    return DirectoryResult(
        pieces.parts,
        (tuple(trace.collectives),),
        passes.programs,
        tuple((each.direction, each.message) for each in trace.moved),
        (tuple(trace.transferred),),
        passes.receipt,
        stored_of(model),
        {name: Owned(own, name in trained) for name, own in ownership_of(model).items()},
    )
