"""The loss of a causal language model as transformers defines it, of logits whose vocabulary is cut."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from plait.errors import ConfigError
from plait.hf.twin.batch import WholeBatch
from plait.parallel.loss import vocab_parallel_cross_entropy


class CausalLoss:
    """What takes the place of `model.loss_function`.

        logits     [B, S, V/tp]    own columns
        labels     [B, S]          the same on all tp ranks; the one at t + 1 is what t is to predict
        loss       []              the same on all tp ranks

    The mean over the labels that are not `ignore_index`, or their sum over `num_items_in_batch` where that is given.
    It moves what `vocab_parallel_cross_entropy` does.
    """

    def __init__(self, batch: WholeBatch) -> None:
        self.batch = batch

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss; what else a model passes on means nothing to it, as in transformers.

        Raises:
            ConfigError: sequences are cut over context ranks, and labels are not shifted, or not counted over all.
        """
        degree = self.batch.mesh.cp.degree
        if degree > 1 and (shift_labels is None or num_items_in_batch is None):
            raise ConfigError(
                f"labels of tokens that {degree} context ranks share: that of a last token is another rank's token, "
                "and a mean of means is none",
                hint="give shift_labels, shifted before plait.take_own_tokens, and num_items_in_batch, of all ranks",
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits.flatten(0, -2),
            shift_labels.flatten().to(logits.device),
            None if self.batch.gathers_logits else self.batch.mesh,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
