"""The models of rows: Llama where the MLP is gated, else GPT, with grouped queries if the row says so."""

from typing import Any

from pydantic import ValidationError

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.section import Count
from plait.planner.score.row import NotCovered, Row

_GATED = ("swiglu", "geglu", "silu", "gated")


class GroupedGptConfig(GptConfig):
    """A GPT whose query heads share key and value heads, as Nemotron's; plait runs none, but its contract is clear.

    Its positions are rotary: of the position table there is a single row.
    """

    num_groups: Count

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_groups


def build_model(row: Row) -> ModelConfig:
    """The model of a row.

    Raises:
        NotCovered: a size is not given, or the sizes are of no model.
    """
    fields: dict[str, Any] = {
        "num_layers": row.size("layers"), "width": row.size("hidden"), "num_heads": row.size("heads"),
        "vocab_size": row.size("vocab"), "max_seq_len": row.size("seq"),
    }  # fmt: skip
    kv_heads, mlp = row.size("kv_heads", fields["num_heads"]), str(row.model.get("mlp") or "").lower()
    try:
        if any(name in mlp for name in _GATED):
            return LlamaConfig(**fields, num_kv_heads=kv_heads, mlp_width=row.size("ffn"))
        fields["mlp_width"] = row.size("ffn", 4 * fields["width"])
        # Megatron-LM's default, which a row without a word on its MLP ran with; later models leave dropout out.
        dropout = 0.0 if mlp else 0.1
        fields |= {"dropout": dropout, "attention_dropout": dropout}
        if kv_heads == fields["num_heads"]:
            return GptConfig(**fields)
        grouped = {"num_groups": kv_heads, "tied_embeddings": False, "max_seq_len": 1}
        return GroupedGptConfig(**fields | grouped)
    except ValidationError as error:
        raise NotCovered(f"not a model that plait knows: {error.errors()[0]['msg']}") from error
