"""JAX on CPU devices.

mode "gspmd":       jit with NamedSharding; the partitioner (GSPMD/Shardy) places collectives.
mode "collective":  shard_map with hand-written collective matmuls: the all-gather and the
                    reduce-scatter are cut into ring steps (ppermute) between the matmul chunks.
With one process, XLA's host devices exchange data inside the process (no sockets); with several
processes (``processes=2`` in peers_table) jax.distributed uses JAX's own gloo.
JAX has no thread-count switch that holds for all kernels: the one-thread run is pinned to a core.
"""

import os
from functools import partial

import numpy as np

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
DEVICES = int(os.environ.get("BENCH_JAX_DEVICES", "1"))  # devices per process
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

from harness.workitem import EPS, SHARD_DIM, WorkItem  # noqa: E402

AXIS = "tp"


def norm(x, w):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + EPS)
    return x32.astype(x.dtype) * w


def split(t, head_dim):
    return t.reshape(*t.shape[:2], -1, head_dim)


def attention(q, k, v):
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*out.shape[:2], -1)


# ---- GSPMD -------------------------------------------------------------------------------------


def gspmd_block(item, w, x, constrain):
    h = constrain(norm(x, w["attn_norm"]), P())
    q, k, v = (split(h @ w[n].T, item.head_dim) for n in ("wq", "wk", "wv"))
    x = x + constrain(attention(q, k, v) @ w["wo"].T, P(None, AXIS))
    h = constrain(norm(x, w["mlp_norm"]), P())
    h = jax.nn.silu(h @ w["w_gate"].T) * (h @ w["w_up"].T)
    return x + constrain(h @ w["w_down"].T, P(None, AXIS))


def gspmd_loss(w, tokens, targets, constrain):
    h = constrain(jnp.take(w["embedding"], tokens, axis=0), P())
    logits = constrain(h @ w["lm_head"].T, P(None, None, AXIS)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


# ---- shard_map with collective matmul ----------------------------------------------------------


def gather_matmul(x, w, world):
    """all_gather(x, seq) @ w.T, one ring step per chunk: the next chunk travels meanwhile."""
    me = jax.lax.axis_index(AXIS)
    ring = [(i, (i - 1) % world) for i in range(world)]
    parts = []
    for step in range(world):
        travelling = jax.lax.ppermute(x, AXIS, ring) if step + 1 < world else None
        parts.append(x @ w.T)
        x = travelling
    # part i belongs to sequence chunk (me + i) % world
    stacked = jnp.roll(jnp.stack(parts), me, axis=0)
    return jnp.concatenate(list(stacked), axis=1)


def matmul_scatter(x, w, world):
    """reduce_scatter(x @ w.T, seq), one ring step per chunk: the sum so far travels meanwhile."""
    me = jax.lax.axis_index(AXIS)
    ring = [(i, (i + 1) % world) for i in range(world)]
    rows = x.shape[1] // world
    total = None
    for step in range(world):
        chunk = (me + world - 1 - step) % world
        part = jax.lax.dynamic_slice_in_dim(x, chunk * rows, rows, axis=1) @ w.T
        total = part if total is None else part + jax.lax.ppermute(total, AXIS, ring)
    return total


def ring_block(item, world, w, x):
    qkv = gather_matmul(norm(x, w["attn_norm"]), jnp.concatenate([w["wq"], w["wk"], w["wv"]]), world)
    d = item.head_dim
    nq, nkv = item.heads * d // world, item.kv_heads * d // world
    q, k, v = (split(t, d) for t in jnp.split(qkv, [nq, nq + nkv], axis=-1))
    x = x + matmul_scatter(attention(q, k, v), w["wo"], world)
    h = gather_matmul(norm(x, w["mlp_norm"]), jnp.concatenate([w["w_gate"], w["w_up"]]), world)
    gate, up = jnp.split(h, 2, axis=-1)
    return x + matmul_scatter(jax.nn.silu(gate) * up, w["w_down"], world)


def ring_loss(world, w, tokens, targets):
    me, rows = jax.lax.axis_index(AXIS), w["embedding"].shape[0]

    def local(ids):
        i = ids - me * rows
        return jnp.clip(i, 0, rows - 1), (i >= 0) & (i < rows)

    i, mine = local(tokens)
    h = jnp.where(mine[..., None], jnp.take(w["embedding"], i, axis=0), 0)
    h = jax.lax.psum_scatter(h, AXIS, scatter_dimension=1, tiled=True)
    logits = gather_matmul(h, w["lm_head"], world).astype(jnp.float32)
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), AXIS)
    total = jax.lax.psum(jnp.exp(logits - top[..., None]).sum(-1), AXIS)
    i, mine = local(targets)
    picked = jnp.take_along_axis(logits, i[..., None], axis=-1)[..., 0]
    picked = jax.lax.psum(jnp.where(mine, picked, 0), AXIS)
    return jnp.mean(jnp.log(total) + top - picked)


# ---- plugin ------------------------------------------------------------------------------------


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "gspmd"):
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        port = int(os.environ["MASTER_PORT"])
        jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, rank, local_device_ids=[0])
    devices = jax.devices()
    if len(devices) != world:
        raise RuntimeError(f"{len(devices)} JAX devices, wanted {world}")
    mesh = Mesh(np.array(devices), (AXIS,))
    dtype = jnp.dtype(item.dtype)

    def put(array, spec, cast=True):
        if cast:
            array = np.asarray(array).astype(dtype)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda i: array[i])

    specs = {n: P() if SHARD_DIM[n] is None else P(*([None] * SHARD_DIM[n]), AXIS) for n in item.weight_names}
    w = {n: put(item.weight(n), specs[n]) for n in item.weight_names}
    constrain = lambda t, spec: jax.lax.with_sharding_constraint(t, NamedSharding(mesh, spec))  # noqa: E731
    sharded = partial(jax.shard_map, mesh=mesh, check_vma=False)

    if item.kind == "block":
        inputs = (put(item.x(), P(None, AXIS)), put(item.dy(), P(None, AXIS)))
        if mode == "gspmd":
            forward = lambda w, x: gspmd_block(item, w, x, constrain)  # noqa: E731
        else:
            forward = sharded(
                partial(ring_block, item, world), in_specs=(specs, P(None, AXIS)), out_specs=P(None, AXIS)
            )

        def run(w, x, dy):
            y, pull = jax.vjp(forward, w, x)
            dw, dx = pull(dy)
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), dw, dx
    else:
        inputs = (
            put(item.tokens().astype(np.int32), P(), cast=False),
            put(item.targets().astype(np.int32), P(), cast=False),
        )
        if mode == "gspmd":
            forward = lambda w, t, y: gspmd_loss(w, t, y, constrain)  # noqa: E731
        else:
            forward = sharded(partial(ring_loss, world), in_specs=(specs, P(), P()), out_specs=P())

        def run(w, tokens, targets):
            loss, dw = jax.value_and_grad(forward)(w, tokens, targets)
            return loss, dw, None

    shardings = ({n: NamedSharding(mesh, s) for n, s in specs.items()},)
    out = (NamedSharding(mesh, P()), shardings[0], NamedSharding(mesh, P(None, AXIS)) if item.kind == "block" else None)
    compiled = jax.jit(run, out_shardings=out)
    last = {}

    def step():
        last["out"] = jax.block_until_ready(compiled(w, *inputs))

    def squares(t):
        """Sum of squares over this process's shards, each counted 1 / (times it is held)."""
        held = len(devices) / len({str(i) for i in t.sharding.devices_indices_map(t.shape).values()})
        return sum(float(np.square(np.asarray(s.data, np.float64)).sum()) / held for s in t.addressable_shards)

    def fingerprint():
        loss, dw, dx = last["out"]
        result = {"loss": float(np.asarray(loss.addressable_shards[0].data)) / PROCESSES}
        if dx is not None:
            result["x"] = squares(dx)
        return result | {n: squares(g) for n, g in dw.items()}

    return step, fingerprint
