"""The core of causal attention, queries against keys, as a module that `plait.parallelize` can replace."""

from dataclasses import replace
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import CAUSAL, AttentionMask
from plait.errors import ConfigError
from plait.parallel.context.attention import attend
from plait.parallel.context.context import Context
from plait.parallel.context.sequences import current_sequences
from plait.parallel.dropout import AttentionDropout


class CausalAttention(nn.Module):
    """Attention of each token to itself and those before it in its sequence, or in its document, on one device.

    q_BNSH                   [B, N, S, H]
    k_BKSH, v_BKSH           [B, K, S, H]     each read by N/K query heads
    y_BNSH                   [B, N, S, H]

    Where dropout of the probabilities is active, these exist whole: `[B, N, S, S]`.

    Attributes:
        window: a token sees those less than so far away; all, if None.
        mask: what sees what in the pass under way, whatever the window; `plait.enter_sequences` sets it.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.mask = CAUSAL

    def forward(
        self,
        q_BNSH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        dropout: AttentionDropout | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend; `dropout` is that of the probabilities, for as many KV heads as query heads.

        Scores are multiplied by `scale`, else by `1 / sqrt(H)`.
        """
        return attend_alone(q_BNSH, k_BKSH, v_BKSH, _narrow(self.mask, self.window), dropout, scale)


class ContextParallelAttention(nn.Module):
    """The same over sequences that are cut over the context axis, and in packed ones document by document.

    q_BNSH                   [B, N, S/cp, H]
    k_BKSH, v_BKSH           [B, K, S/cp, H]     each read by N/K query heads
    y_BNSH                   [B, N, S/cp, H]

    What moves over cp is what `plait.parallel.context.attention.attend` says.
    """

    def __init__(self, mesh: Mesh, method: ContextMethod, name: str, window: int | None = None) -> None:
        super().__init__()
        self.mesh, self.method, self.name, self.window = mesh, method, name, window

    def forward(
        self,
        q_BNSH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        dropout: AttentionDropout | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend over all tokens of the pass under way, as `plait.enter_sequences` told of them.

        Raises:
            ConfigError: dropout of probabilities, of which no rank of a context axis has all.
        """
        mesh, is_dropped = self.mesh, dropout is not None and dropout.is_active
        if mesh.cp.degree == 1 and (mesh.sequences is None or not mesh.sequences.mask.documents or is_dropped):
            mask = CAUSAL if mesh.sequences is None else mesh.sequences.mask
            return attend_alone(q_BNSH, k_BKSH, v_BKSH, _narrow(mask, self.window), dropout, scale)
        if is_dropped:
            raise build_dropout_error(self.name, mesh.cp.degree)
        sequences = current_sequences(mesh, self.name)
        context, mask = Context(mesh.cp, self.method, sequences.order), _narrow(sequences.mask, self.window)
        return attend(q_BNSH, k_BKSH, v_BKSH, context, mask, scale=scale, label=self.name)

    def extra_repr(self) -> str:
        """How ranks meet."""
        return f"{self.method}, cp={self.mesh.cp.degree}"


def build_dropout_error(name: str, degree: int) -> ConfigError:
    """Attention dropout over a context axis."""
    return ConfigError(
        f"{name}: dropout of attention probabilities over a context axis of degree {degree}: these never exist there",
        hint="set attention dropout to 0, or cp to 1",
    )


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of whole sequences on one device."""
    if dropout is not None and dropout.is_active:
        return dropout(compute_attention_probabilities(q, k, mask, scale)) @ v
    is_grouped = q.shape[1] != k.shape[1]
    if not mask.documents and mask.window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
    is_seen = ~build_hidden(mask, q.shape[0], q.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scale, enable_gqa=is_grouped)


def compute_attention_probabilities(
    q_BNSH: Tensor, k_BNSH: Tensor, mask: AttentionMask = CAUSAL, scale: float | None = None
) -> Tensor:
    """Causal softmax of the scaled scores, `[B, N, S, S]`; torch normalises half types in float32."""
    seq_len, head_width = q_BNSH.shape[-2:]
    scores_BNSS = q_BNSH @ k_BNSH.transpose(-2, -1)
    scores_BNSS = scores_BNSS / sqrt(head_width) if scale is None else scores_BNSS * scale
    is_hidden = build_hidden(mask, q_BNSH.shape[0], seq_len, q_BNSH.device)
    return scores_BNSS.masked_fill(is_hidden, float("-inf")).softmax(-1)


def build_hidden(mask: AttentionMask, batch: int, seq_len: int, device: torch.device) -> Tensor:
    """Which keys are behind a query, too far before it or in another document, `[S, S]` or `[B, 1, S, S]`.

    Padding sees itself.
    """
    is_hidden_SS = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
    if mask.window is not None:
        is_hidden_SS |= torch.ones_like(is_hidden_SS).tril(-mask.window)
    if not mask.documents:
        return is_hidden_SS
    mask.check_fits(batch, seq_len)
    numbers_BS = torch.full((batch, seq_len), -1, dtype=torch.int64, device=device)
    for row in range(batch):
        for number, document in enumerate(mask.documents[row if len(mask.documents) > 1 else 0]):
            numbers_BS[row, document.start : document.stop] = number
    is_other_BSS = (numbers_BS.unsqueeze(2) != numbers_BS.unsqueeze(1)) | (numbers_BS < 0).unsqueeze(1)
    is_itself_SS = torch.eye(seq_len, dtype=torch.bool, device=device)
    return ((is_hidden_SS | is_other_BSS) & ~is_itself_SS).unsqueeze(1)


def _narrow(mask: AttentionMask, window: int | None) -> AttentionMask:
    return mask if window is None else replace(mask, window=window)
