"""Causal attention of the Llama and GPT-2 families.

The sizes `[B, S]` come from the model, not from the input's shape: under sequence parallelism the input of a module is
only this rank's tokens until the projections have gathered it.
"""

from torch import Tensor, nn

from plait.config.model import GptConfig, LlamaConfig
from plait.models.rope import RopeTables, apply_rope
from plait.parallel.context.core import CausalAttention
from plait.parallel.dropout import AttentionDropout


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    x_TD                     [T, D]
    q_BSNH                   [B, S, N, H]
    k_BSKH, v_BSKH           [B, S, K, H]     each read by N/K query heads
    returns                  [T, D]
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        query_width, kv_width = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        self.wq = nn.Linear(config.width, query_width, bias=config.qkv_bias)
        self.wk = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        self.wv = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        self.core = CausalAttention()
        self.wo = nn.Linear(query_width, config.width, bias=False)

    def forward(self, x_TD: Tensor, size_BS: tuple[int, int], rope: RopeTables) -> Tensor:
        """Attend, each token to itself and to those before it in its sequence."""
        q_BSNH = self.wq(x_TD).view(*size_BS, -1, self.head_width)
        k_BSKH = self.wk(x_TD).view(*size_BS, -1, self.head_width)
        v_BSKH = self.wv(x_TD).view(*size_BS, -1, self.head_width)
        q_BSNH, k_BSKH = apply_rope(q_BSNH, rope), apply_rope(k_BSKH, rope)
        y_BNSH = self.core(q_BSNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2))
        return self.wo(merge_heads(y_BNSH))


class GptAttention(nn.Module):
    """Multi-head attention with biases and dropout on the probabilities.

    x_TD                     [T, D]
    q, k, v                  [B, N, S, H]
    probabilities            [B, N, S, S]     exist only while training with dropout
    returns                  [T, D]
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        heads_width = config.num_heads * config.head_width
        self.wq = nn.Linear(config.width, heads_width)
        self.wk = nn.Linear(config.width, heads_width)
        self.wv = nn.Linear(config.width, heads_width)
        self.core = CausalAttention()
        self.wo = nn.Linear(heads_width, config.width)
        self.dropout = AttentionDropout(config.attention_dropout)

    def forward(self, x_TD: Tensor, size_BS: tuple[int, int]) -> Tensor:
        """Attend, each token to itself and to those before it in its sequence."""
        q_BNSH, k_BNSH, v_BNSH = (
            linear(x_TD).view(*size_BS, -1, self.head_width).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        return self.wo(merge_heads(self.core(q_BNSH, k_BNSH, v_BNSH, self.dropout)))


def merge_heads(y_BNSH: Tensor) -> Tensor:
    """`[B, N, S, H]` to the output projection's input `[T, N*H]`."""
    return y_BNSH.transpose(1, 2).flatten(0, 1).flatten(1)
