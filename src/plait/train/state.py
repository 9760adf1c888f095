"""Where a run is, and its way to a checkpoint and back."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from zlib import crc32

from torch import Tensor

from plait.checkpoint.index import Index
from plait.checkpoint.names import folder_name, history_name, list_checkpoints, model_name, optimizer_name
from plait.checkpoint.part import Owned, build_owned
from plait.checkpoint.save import set_aside
from plait.checkpoint.sharded import check_checkpoint, load_checkpoint
from plait.checkpoint.weights import derive_fingerprint
from plait.comm.agree import share, together
from plait.comm.mesh import Mesh
from plait.config.run import AnyRun, FineTuneConfig, RunConfig
from plait.contract.model import derive_recipes
from plait.contract.quantization import list_histories
from plait.errors import CheckpointError, ConfigError
from plait.hf.directory.source import Intervals, derive_part_shape, take_own_part
from plait.parallel.apply import intervals_of, ownership_of, record_of, repeated_in
from plait.parallel.precision.model import find_precisions
from plait.quant.history import AmaxHistories
from plait.sharding import Ownership
from plait.train.corpus.tokens import TokenStream
from plait.train.step import Trainer

_HISTORIES = "amax_history"
"""Under which key the state of a checkpoint tells of what delayed scales look back at."""

_LISTED = 3

_MAX_POSITION = 1 << 63
"""Steps and sequences are counted in 64 bits."""

_FREE = frozenset(
    ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "tokenizer_class")
)
"""Keys of a `config.json` that do not decide what a model computes here."""


@dataclass(frozen=True)
class Position:
    """How far a run is. Data order and dropout masks are functions of seed and position, so nothing else is random."""

    step: int = 0
    consumed_sequences: int = 0

    def advance(self, run: AnyRun) -> Self:
        """The position after one more step."""
        per_step = run.tokens_per_step // run.seq_len
        return replace(self, step=self.step + 1, consumed_sequences=self.consumed_sequences + per_step)


def checkpoint_folder(run: AnyRun) -> Path:
    """Where the run's checkpoints are."""
    return Path(run.out_dir) / run.name / "checkpoints"


def derive_identity(trainer: Trainer, stream: TokenStream) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes from it: the model, and the order of the data.

    Of a directory that is trained further, that is its architecture, and the weights themselves where some of them are
    not trained: these are in no checkpoint, but read from the directory again. Everything else may change: the mesh,
    the batch, the precision, the schedule.
    """
    run = trainer.run
    model = run.model.model_dump(mode="json", exclude={"path": True, "lora": {"path"}})
    is_frozen = any(not param.requires_grad for param in trainer.model.parameters())
    frozen = {}
    if isinstance(run, FineTuneConfig) and is_frozen:
        frozen["model.weights"] = derive_fingerprint(Path(run.model.path))
    return {
        **{f"model.{key}": value for key, value in model.items()},
        **{f"config.json {key}": value for key, value in (trainer.hf_config or {}).items() if key not in _FREE},
        **frozen,
        "seed": run.seed,
        "train.seq_len": run.seq_len,
        "data": stream.fingerprint(),
    }


def build_state(trainer: Trainer, position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """All that a checkpoint holds beside tensors.

    Learning rate, order of the data, dropout masks and stochastic rounding are functions of config, seed and position:
    with these, no generator has a state of its own.
    """
    state: dict[str, Any] = {
        "position": asdict(position),
        "identity": dict(identity),
        "config": trainer.run.model_dump(mode="json"),
    }
    if (histories := _describe_histories(trainer)) is not None:
        state[_HISTORIES] = histories
    if trainer.hf_config is not None:
        state["hf_config"] = dict(trainer.hf_config)
    return state


class Found(NamedTuple):
    """What a run resumes from."""

    folder: Path | None
    skipped: tuple[str, ...] = ()
    """Of each damaged checkpoint that is newer, why it is not that one."""


def find_checkpoint(trainer: Trainer) -> Found:
    """The checkpoint that the run resumes from, as rank 0 finds it and `train.resume` wants it; every rank calls it.

    Raises:
        ConfigError: there must be one and is not, or there must not be one and is.
        CheckpointError: all that there are are damaged.
    """
    run, mesh = trainer.run, trainer.mesh
    directory = checkpoint_folder(run)
    with together(mesh):
        found = [folder for _, folder in reversed(list_checkpoints(directory))] if mesh.rank == 0 else []
        if not found and run.train.resume == "must" and mesh.rank == 0:
            raise ConfigError(f'train.resume = "must": there is no checkpoint in {directory}')
        if found and run.train.resume == "never":
            raise ConfigError(
                f'train.resume = "never": {directory} has checkpoints already, the newest {found[0].name}',
                hint="give the run another name, or delete the folder",
            )
    found = share(found, mesh)[0]
    if run.train.resume == "last_good" and found:
        return _find_undamaged(found, mesh)
    return Found(found[0] if found else None)


def _find_undamaged(folders: Sequence[Path], mesh: Mesh) -> Found:
    """The first that is as it was written. Those before it make room for the checkpoints that the run writes again."""
    problems: list[str] = []
    for folder in folders:
        try:
            check_checkpoint(folder, mesh)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        with together(mesh):
            for damaged in folders[: len(problems)] if mesh.rank == 0 else ():
                set_aside(damaged)
        return Found(folder, tuple(problems))
    listed = "".join(f"\n  - {problem}" for problem in problems)
    raise CheckpointError(f'train.resume = "last_good": no checkpoint is undamaged{listed}', hint="start another run")


def resume(trainer: Trainer, folder: Path, identity: Mapping[str, Any]) -> Position:
    """Load a checkpoint into model and optimizer, on every rank.

    Raises:
        CheckpointError: it is damaged, or of another model or data, or has the histories of other scales; nothing was
            changed.
    """
    histories = _find_histories(trainer)
    with together(trainer.mesh):
        index = Index.from_folder(folder)
        position = _read_position(folder, index, identity)
        _check_histories(folder, index.state.get(_HISTORIES), _describe_histories(trainer))
    load_checkpoint(folder, list_tensors(trainer), trainer.mesh)
    if histories is not None:
        histories.refresh()
    trainer.optimizer.apply_masters()
    trainer.optimizer.resume_at(position.step)
    return position


def list_tensors(trainer: Trainer) -> dict[str, Owned]:
    """Every tensor of the run by its name in a checkpoint: the float32 masters, and the moments, owned as they are.

    Delayed scales look back at histories that every rank has. What is not trained is not among them.
    """
    ownership, held = ownership_of(trainer.model), intervals_of(trainer.model)
    tensors = [(model_name, fqn, master) for fqn, master in trainer.optimizer.masters.items()]
    tensors += [(partial(optimizer_name, kind), fqn, moment) for kind, fqn, moment in trainer.optimizer.moments()]
    listed = {
        build_name(part): owned
        for build_name, fqn, tensor in tensors
        for part, owned in _list_parts(trainer, ownership[fqn], held[fqn], tensor.detach())
    }
    histories = _find_histories(trainer)
    if histories is not None:
        for name, values in zip(map(history_name, histories.names), histories.values, strict=True):
            listed[name] = _own(trainer, Ownership(name, (histories.length,)), None, values)
    return listed


def _own(trainer: Trainer, ownership: Ownership, held: Intervals | None, tensor: Tensor) -> Owned:
    """What FSDP has cut, all ranks of dp_shard write; of ranks that hold the same, one does, not always the first."""
    mesh, record = trainer.mesh, record_of(trainer.model)
    is_cut = record is not None and record.sharded_over is not None and held is not None
    holders = mesh.dp_replicate if is_cut else mesh.dp_cp
    is_writer = holders.rank == crc32(ownership.name.encode()) % holders.degree
    is_writer = is_writer and ownership.name not in repeated_in(trainer.model)
    owned = build_owned(ownership, tensor, mesh.tp.rank, is_replica_written=is_writer)
    return owned if held is None else replace(owned, intervals=held)


def _list_parts(trainer: Trainer, ownership: Ownership, held: Intervals, tensor: Tensor) -> Iterator[tuple[str, Owned]]:
    """What of a tensor has a name of its own in a checkpoint: all of it, or views of its parts."""
    parts = trainer.parts.get(ownership.name)
    if parts is None:
        yield ownership.name, _own(trainer, ownership, held, tensor)
        return
    owned = _own(trainer, ownership, held, tensor)
    for fqn, stored in parts:
        intervals, part = take_own_part(owned.tensor, owned.intervals, stored)
        yield fqn, replace(owned, shape=derive_part_shape(stored), intervals=intervals, tensor=part)


def _find_histories(trainer: Trainer) -> AmaxHistories | None:
    return next((each.histories for each in find_precisions(trainer.model)), None)


def _describe_histories(trainer: Trainer) -> dict[str, Any] | None:
    """What has to be the same in a run that goes on with them, of all pipeline stages; None where no scale looks back.

    Every rank says the same, whatever its stages have.
    """
    run = trainer.run
    recipe = run.quantization.resolved
    if recipe is None or not recipe.is_delayed:
        return None
    if isinstance(run, RunConfig):
        names = list_histories(derive_recipes(run.model, run.quantization))
    else:
        histories = _find_histories(trainer)
        names = [] if histories is None else list(histories.names)
    return {
        "quantization.recipe": run.quantization.recipe,
        "quantization.amax_history": recipe.amax_history,
        "tensors": names,
    }


def _check_histories(folder: Path, saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Refuse histories that are not those of the scales of this run.

    Raises:
        CheckpointError: names what differs.
    """
    if saved == now:
        return
    saved, now = saved or {}, now or {}
    differing = [
        f"{key}: {saved.get(key, 'no history')} in the checkpoint, {now.get(key, 'no history')} now"
        for key in ("quantization.recipe", "quantization.amax_history")
        if saved.get(key) != now.get(key)
    ]
    before, after = set(saved.get("tensors", ())), set(now.get("tensors", ()))
    for what, names in (("in the checkpoint alone", before - after), ("new", after - before)):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            differing.append(f"{what}: {', '.join(sorted(names)[:_LISTED])}{more}")
    listed = "".join(f"\n  - {line}" for line in differing)
    raise CheckpointError(
        f"{folder}: delayed scales of this run cannot go on with its histories of largest magnitudes{listed}",
        hint="go back to the quantization of the checkpoint, or give this run another name",
    )


def _read_position(folder: Path, index: Index, identity: Mapping[str, Any]) -> Position:
    try:
        saved: dict[str, Any] = {**index.state["identity"]}
        position = Position(**index.state["position"])
        if not all(0 <= operator.index(value) < _MAX_POSITION for value in asdict(position).values()):
            raise ValueError(position)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: is not a checkpoint of `plait train` ({error!r})") from error
    if folder.name != folder_name(position.step):
        raise CheckpointError(
            f"{folder}: was saved after step {position.step}, and has another name",
            hint=f"give it back its name, {folder_name(position.step)}, or delete it",
        )
    differing = [
        f"{key}: {saved.get(key)!r} in the checkpoint, {identity.get(key)!r} now"
        for key in {**saved, **identity}
        if saved.get(key) != identity.get(key)
    ]
    if differing:
        listed = "".join(f"\n  - {line}" for line in differing)
        raise CheckpointError(
            f"{folder}: belongs to another run{listed}",
            hint="give this run another name, or go back to the config of the checkpoint",
        )
    return position
