"""The Llama family (Touvron et al., arXiv:2302.13971), which Qwen2 (biases on q, k, v) and SmolLM2 are members of."""

from collections.abc import Iterable

from torch import Tensor, nn

from plait.config.model import LlamaConfig
from plait.models.attention import LlamaAttention
from plait.models.mlp import LlamaMLP
from plait.models.rope import RopeTables, build_rope_tables
from plait.parallel.context.sequences import TokenPositions
from plait.parallel.region.norm import RMSNorm


class LlamaModel(nn.Module):
    """A causal language model: `tokens_BS` of int64 in, logits `[T, V]` out, `T = B*S`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = TokenPositions()
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        size_BS = (tokens_BS.shape[0], tokens_BS.shape[1])
        return self.predict(self.run_blocks(self.embed(tokens_BS), size_BS, self.layers.children()))

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """What the first block reads, `[T, D]`."""
        return self.embedding(tokens_BS.flatten())

    def run_blocks(self, x_TD: Tensor, size_BS: tuple[int, int], blocks: Iterable[nn.Module]) -> Tensor:
        """Some consecutive blocks."""
        rope = build_rope_tables(self.config, self.positions(size_BS, x_TD.device), like=x_TD)
        for block in blocks:
            x_TD = block(x_TD, size_BS, rope)
        return x_TD

    def predict(self, x_TD: Tensor) -> Tensor:
        """From what the last block gives to logits."""
        return self.head(self.norm(x_TD))


class LlamaBlock(nn.Module):
    """Attention and MLP, each behind its norm and beside the residual stream, `[T, D] -> [T, D]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = LlamaAttention(config)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x_TD: Tensor, size_BS: tuple[int, int], rope: RopeTables) -> Tensor:
        """Add what attention and the MLP contribute."""
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), size_BS, rope)
        return x_TD + self.mlp(self.mlp_norm(x_TD))
