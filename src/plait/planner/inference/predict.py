"""Predict a server of one tensor degree."""

from plait.config.conflicts import list_block_conflicts
from plait.config.model import GptConfig, ModelConfig
from plait.errors import ConfigError, ShardingError
from plait.planner.cluster import Cluster
from plait.planner.inference.forward import build_decode, build_prefill
from plait.planner.inference.memory import predict_inference_memory
from plait.planner.inference.prediction import InferencePrediction
from plait.planner.inference.server import Load, ServerConfig, check_load, check_server
from plait.planner.planned import list_missing_instructions
from plait.planner.predict import list_weak_recipes


def predict_inference(model: ModelConfig, cluster: Cluster, server: ServerConfig, load: Load) -> InferencePrediction:
    """What requests of `load` take on one replica of `server.tp` devices.

    Raises:
        ConfigError: a load that cannot be, a degree beyond the cluster, or a constant that the catalog lacks.
        ShardingError: a degree that the model cannot be cut into.
    """
    check_load(load, model.max_seq_len)
    check_server(server, cluster.num_devices)
    _check_recipe(model, cluster, server)
    served = _drop_dropout(model)
    prefills = {
        mode: build_prefill(served, cluster, server, load, sequence_parallel=mode) for mode in _list_modes(server, load)
    }
    mode = min(prefills, key=lambda each: prefills[each].cost.seconds)
    decode = build_decode(served, cluster, server, load)
    memory = predict_inference_memory(
        served, server, load, sequence_parallel=mode, capacity_bytes=cluster.hardware.memory.capacity_bytes.value
    )
    return InferencePrediction(
        model, cluster, server.in_mode(mode), load, prefills[mode].cost, decode.cost,
        prefills[mode].terms, decode.terms, memory, _list_weak(cluster, server, load),
    )  # fmt: skip


def _check_recipe(model: ModelConfig, cluster: Cluster, server: ServerConfig) -> None:
    plan = server.build_plan(1, sequence_parallel=False)
    if problems := list_missing_instructions(cluster.hardware, plan):
        raise ConfigError.from_problems("inference", problems)
    if torn := next(iter(list_block_conflicts(model, plan.parallel, plan.section)), None):
        raise ShardingError(f"tp = {server.tp}, quantization = {server.quantization}: {torn.text}", hint=torn.hint)


def _list_modes(server: ServerConfig, load: Load) -> tuple[bool, ...]:
    """All-reduce mode for one rank, which shards nothing, and for fewer tokens than ranks."""
    if server.tp == 1 or load.prefill_batch * load.prompt_len < server.tp:
        return (False,)
    return (True, False) if server.sequence_parallel is None else (server.sequence_parallel,)


def _drop_dropout(model: ModelConfig) -> ModelConfig:
    """Nothing is dropped when a model answers."""
    if isinstance(model, GptConfig):
        return model.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    return model


def _list_weak(cluster: Cluster, server: ServerConfig, load: Load) -> tuple[str, ...]:
    """Where predictions are known to be less sure than their intervals say."""
    weak = []
    if cluster.hardware.topology.place(server.tp, num_devices=server.tp).across > 1:
        weak.append("a tp group that leaves the scale-up domain: latency and efficiency of the network are assumed")
    if server.launch == "host":
        weak.append("launched by the host: only collectives are, other kernels are timed as from a graph")
    if server.tp > 1:
        weak.append("all-reduces are the library's: one-shot kernels are faster for few tokens, and were not measured")
    if server.quantization == "fp8_rowwise":
        weak.append("rowwise scales: its GEMMs were not measured, and are timed as tensorwise ones")
    weak += list_weak_recipes(server.build_plan(1, sequence_parallel=False))
    return tuple(weak)
