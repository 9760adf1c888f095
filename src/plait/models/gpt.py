"""The GPT-2 family: LayerNorm before each part, biases, learned positions, GELU and dropout."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.config.model import GptConfig
from plait.errors import ConfigError
from plait.models.attention import GptAttention
from plait.models.mlp import GptMLP
from plait.parallel.context.sequences import TokenPositions
from plait.parallel.dropout import Dropout


class GptModel(nn.Module):
    """A causal language model: `tokens_BS` of int64 in, logits `[T, V]` out, `T = B*S`."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = TokenPositions()
        self.position_embedding = nn.Embedding(config.max_seq_len, config.width)
        self.embedding_dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(GptBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        size_BS = (tokens_BS.shape[0], tokens_BS.shape[1])
        return self.predict(self.run_blocks(self.embed(tokens_BS), size_BS, self.layers.children()))

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """What the first block reads, `[T, D]`."""
        positions_T = self._build_positions((tokens_BS.shape[0], tokens_BS.shape[1]), tokens_BS.device)
        x_TD = self.embedding(tokens_BS.flatten()) + self.position_embedding(positions_T)
        return self.embedding_dropout(x_TD)

    def run_blocks(self, x_TD: Tensor, size_BS: tuple[int, int], blocks: Iterable[nn.Module]) -> Tensor:
        """Some consecutive blocks."""
        for block in blocks:
            x_TD = block(x_TD, size_BS)
        return x_TD

    def predict(self, x_TD: Tensor) -> Tensor:
        """From what the last block gives to logits."""
        return self.head(self.norm(x_TD))

    def _build_positions(self, size_BS: tuple[int, int], device: torch.device) -> Tensor:
        seq_len = self.positions.find_length(size_BS)
        if seq_len > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {seq_len} tokens has no position embedding beyond {self.config.max_seq_len}",
                hint="shorten the sequence, or raise model.max_seq_len and train its positions",
            )
        return self.positions(size_BS, device).expand(size_BS).flatten()


class GptBlock(nn.Module):
    """Attention and MLP, each behind its norm and beside the residual stream, `[T, D] -> [T, D]`."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = GptAttention(config)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = GptMLP(config)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x_TD: Tensor, size_BS: tuple[int, int]) -> Tensor:
        """Add what attention and the MLP contribute."""
        x_TD = x_TD + self.attention_dropout(self.attention(self.attention_norm(x_TD), size_BS))
        return x_TD + self.mlp_dropout(self.mlp(self.mlp_norm(x_TD)))
