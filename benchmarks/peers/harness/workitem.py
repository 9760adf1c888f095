"""The one definition of what is being timed.

Two work items, both forward + backward, both with all weight gradients:

``block``  one Llama-style decoder block: RMSNorm -> GQA causal attention -> residual,
           RMSNorm -> SwiGLU MLP -> residual.  No biases, no rotary embedding, no dropout.
           Input x and upstream gradient dy are given; the gradient of x is computed too.
``head``   token embedding -> LM head (untied) -> mean cross entropy over all tokens.

Weights, inputs and targets are drawn with numpy from fixed seeds, so each framework can
build exactly the same problem.  This module imports numpy only; the torch reference
modules live in ``torch_reference.py``.
"""

from dataclasses import asdict, dataclass

import numpy as np

#: canonical names and (out, in) shapes; every peer reports gradients under these names
BLOCK_WEIGHTS = ("attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w_gate", "w_up", "w_down")
HEAD_WEIGHTS = ("embedding", "lm_head")

EPS = 1e-6


@dataclass(frozen=True)
class WorkItem:
    kind: str = "block"  # "block" | "head"
    dtype: str = "float32"  # "float32" | "bfloat16"
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    ffn: int = 2816
    vocab: int = 32000
    seq: int = 1024
    batch: int = 1

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def shape(self, name: str) -> tuple[int, ...]:
        h, d = self.hidden, self.head_dim
        return {
            "attn_norm": (h,),
            "mlp_norm": (h,),
            "wq": (self.heads * d, h),
            "wk": (self.kv_heads * d, h),
            "wv": (self.kv_heads * d, h),
            "wo": (h, self.heads * d),
            "w_gate": (self.ffn, h),
            "w_up": (self.ffn, h),
            "w_down": (h, self.ffn),
            "embedding": (self.vocab, h),
            "lm_head": (self.vocab, h),
        }[name]

    @property
    def weight_names(self) -> tuple[str, ...]:
        return BLOCK_WEIGHTS if self.kind == "block" else HEAD_WEIGHTS

    def weight(self, name: str) -> np.ndarray:
        """Full float32 weight ``name``; identical in every process."""
        seed = 1000 + (BLOCK_WEIGHTS + HEAD_WEIGHTS).index(name)
        shape = self.shape(name)
        w = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            return 1.0 + 0.1 * w
        w *= shape[1] ** -0.5 if name != "embedding" else 1.0
        return w

    def x(self) -> np.ndarray:
        """[batch, seq, hidden] block input."""
        return np.random.default_rng(1).standard_normal((self.batch, self.seq, self.hidden), dtype=np.float32)

    def dy(self) -> np.ndarray:
        """[batch, seq, hidden] gradient that arrives at the block's output."""
        return np.random.default_rng(2).standard_normal((self.batch, self.seq, self.hidden), dtype=np.float32)

    def tokens(self) -> np.ndarray:
        """[batch, seq] int64 token ids."""
        return np.random.default_rng(3).integers(0, self.vocab, (self.batch, self.seq))

    def targets(self) -> np.ndarray:
        """[batch, seq] int64 target ids."""
        return np.random.default_rng(4).integers(0, self.vocab, (self.batch, self.seq))

    def flops(self) -> float:
        """Matrix-multiply FLOPs of one forward + backward (attention counted dense/2)."""
        t = self.batch * self.seq
        if self.kind == "head":
            return 6.0 * t * self.vocab * self.hidden
        params = sum(int(np.prod(self.shape(n))) for n in BLOCK_WEIGHTS)
        attn = 2 * 2 * self.batch * self.seq * self.seq * self.hidden / 2
        return 6.0 * t * params + 3 * attn

    def as_dict(self) -> dict:
        return asdict(self)


#: a tiny variant of both items, for smoke tests
SMALL = dict(hidden=64, heads=8, kv_heads=4, ffn=96, vocab=512, seq=32)


def shard(array: np.ndarray, rank: int, world: int, dim: int = 0) -> np.ndarray:
    """Contiguous equal shard ``rank`` of ``array`` along ``dim`` (a copy)."""
    if array.shape[dim] % world:
        raise ValueError(f"dimension {dim} of {array.shape} does not divide by {world}")
    return np.ascontiguousarray(np.split(array, world, axis=dim)[rank])


#: the dimension along which Megatron-style tensor parallelism cuts each weight (None: replicated)
SHARD_DIM = {
    "attn_norm": None,
    "mlp_norm": None,
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wo": 1,
    "w_gate": 0,
    "w_up": 0,
    "w_down": 1,
    "embedding": 0,
    "lm_head": 0,
}
