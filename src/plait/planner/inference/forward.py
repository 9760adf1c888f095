"""One forward of a server, from tokens to tokens: reading prompts, and generating one token of every request.

Both are the contract's forward, operation by operation, timed as in a training step: linears beside their collectives
by the real schedules, kernels that no contract lists by their bytes. What differs:

    prefill   causal attention over the prompt; keys and values written to the cache; a head of one row a prompt
    decode    one row a request, so GEMMs read the weights once for very few rows; attention reads the cache; the sums
              after row-parallel linears are all-reduces of `batch * width` elements
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from plait.config.model import ModelConfig
from plait.contract.op import Op
from plait.contract.step import list_moves
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost, Kind, join
from plait.planner.inference.circumstance import ServingCircumstance, build_serving
from plait.planner.inference.logits import derive_logits_gather
from plait.planner.inference.server import Load, ServerConfig
from plait.planner.inference.term import Term, sum_terms
from plait.planner.laws import estimate_draw, estimate_flash_attention
from plait.planner.planned import count_bytes, derive_planned_model, is_attention, is_linear
from plait.planner.prediction import HEAD
from plait.planner.step.attention import build_attention, derive_shape
from plait.planner.step.circumstance import build_cost
from plait.planner.step.elementwise import build_elementwise
from plait.planner.step.linear import build_linear


@dataclass(frozen=True, slots=True)
class Forward:
    """The tree of costs, and its seconds by what would shorten them."""

    cost: Cost
    terms: tuple[tuple[Term, float], ...]


def build_prefill(
    model: ModelConfig, cluster: Cluster, server: ServerConfig, load: Load, *, sequence_parallel: bool
) -> Forward:
    """Prompts that are read together, up to the first token of each.

    The host launches ahead of such long kernels, so that collectives take as long as from a graph.
    """
    from_graph = replace(server, launch="graph", sequence_parallel=sequence_parallel)
    return _build_prefill(model, cluster, from_graph, load.prefill_batch, load.prompt_len)


@lru_cache(maxsize=1024)
def _build_prefill(
    model: ModelConfig, cluster: Cluster, server: ServerConfig, num_prompts: int, prompt_len: int
) -> Forward:
    plan = server.build_plan(num_prompts, sequence_parallel=bool(server.sequence_parallel))
    prompts = derive_planned_model(model, plan, prompt_len)
    where = build_serving(cluster, server, prompts, "graph")
    last = build_serving(cluster, server, derive_planned_model(model, plan, 1), "graph")
    return _build_forward("prefill", where, last, None)


@lru_cache(maxsize=1024)
def build_decode(model: ModelConfig, cluster: Cluster, server: ServerConfig, load: Load) -> Forward:
    """A token of every request, at the average length of their contexts."""
    contract = derive_planned_model(model, server.build_plan(load.batch, sequence_parallel=False), 1)
    where = build_serving(cluster, server, contract, server.launch)
    return _build_forward("decode", where, where, load.mean_context_len)


def _build_forward(
    name: str, where: ServingCircumstance, last: ServingCircumstance, context_len: int | None
) -> Forward:
    """`last` is where the rows that a token is drawn from are; `context_len` is that of the cache that is read."""
    contract = where.contract
    block = [cost for op in contract.block for cost in _build_op(op, where, context_len)]
    blocks = join("blocks", block, times=contract.config.num_layers)
    cost = join(name, [_build_embedding(where), blocks, _build_head(last)])
    return Forward(cost, tuple(sum_terms(cost, where, last).items()))


def _build_op(op: Op, where: ServingCircumstance, context_len: int | None) -> list[Cost]:
    kernels = build_elementwise(op, "forward", where)
    if is_attention(op):
        append = where.build_kernel("append to cache", 2 * count_bytes(op.inputs[1:], where.contract))
        return [*kernels, append, _build_core(op, where, context_len)]
    return [build_linear(op, "forward", where), *kernels] if is_linear(op) else kernels


def _build_core(op: Op, where: ServingCircumstance, context_len: int | None) -> Cost:
    """Of a generated token only the query is new: the shape is the contract's, with the keys of all the context."""
    if context_len is None:
        return build_attention(op, "forward", where)
    shape = replace(derive_shape(op, where), keys=context_len)
    dtype = where.contract.setting.dtype
    estimate = estimate_flash_attention(where.hardware, shape, regime="burst", dtype=dtype)
    note = f"{shape.batch} x {shape.kv_heads} KV heads of {context_len} tokens"
    return join(op.name, [build_cost("core", Kind.ATTENTION, estimate, note=note)], note="forward")


def _build_embedding(where: ServingCircumstance) -> Cost:
    """Rows looked up, and summed over tp."""
    parts: list[Cost] = []
    for op in where.contract.entry:
        parts.append(where.build_kernel("look up", 2 * count_bytes(op.outputs, where.contract)))
        parts += where.build_moves(list_moves(op.forward))
    return join("embedding", parts)


def _build_head(where: ServingCircumstance) -> Cost:
    """Final norm, head, all logits gathered on every rank, and a token drawn from them."""
    norm, head = where.contract.exit
    num_logits = where.contract.setting.num_tokens * where.contract.config.vocab_size
    parts = [
        *build_elementwise(norm, "forward", where),
        build_linear(head, "forward", where, is_head=True),
        *where.build_moves(derive_logits_gather(where.contract)),
        build_cost("draw", Kind.MEMORY_BOUND, estimate_draw(where.hardware, num_logits)),
    ]
    return join(HEAD, parts)
