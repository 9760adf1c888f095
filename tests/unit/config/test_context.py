"""What cannot be cut over context ranks is refused before anything starts, all of it at once."""

import pytest

from plait.config.axis.context import ContextConfig
from plait.config.load import load_run_config
from plait.contract.context.attention import ContextMethod
from plait.errors import ConfigError
from plait.sharding.token_order import Order

PACKED = ('data.kind="tokens"', 'data.paths=["none.npy"]', "data.mask_documents=true")


def test_methods_and_orders_are_those_that_exist() -> None:
    fields = ContextConfig.model_fields
    assert set(fields["method"].annotation.__args__) == set(ContextMethod)  # type: ignore[union-attr]
    assert set(fields["order"].annotation.__args__) == set(Order)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "overrides", "match"),
    [
        ("llama-tiny", ["train.seq_len=3", "parallel.cp=4"], "sequences of 3 tokens cannot be cut over 4 ranks"),
        (
            "gpt-tiny",
            ["model.attention_dropout=0.1", "parallel.cp=2"],
            "model.attention_dropout = 0.1",
        ),
        (
            "llama-tiny",
            ["parallel.cp=4", "parallel.tp=4", "context.method=all_to_all"],
            "deals query heads to 4 context-parallel ranks, but a tp rank has only 2 of 8",
        ),
        ("llama-tiny", ["parallel.cp=2", "quantization=fp8_currentscaling"], "scales would be those of other tokens"),
        ("llama-tiny", ["parallel.cp=2", "train.compile=true"], "attention that takes its keys block by block"),
        ("llama-tiny", ["parallel.cp=2", "parallel.tp=4", "train.seq_len=6"], "3 tokens of a micro-batch cannot be"),
        ("llama-tiny", list(PACKED), "nothing says which token of the token files ends a document"),
        ("llama-tiny", [*PACKED, "data.end_of_text_id=0", "train.compile=true"], "data.mask_documents = true"),
        (
            "llama-tiny",
            [*PACKED, "data.end_of_text_id=256"],
            "is no token of the model, which has model.vocab_size = 256",
        ),
        (
            "llama-tiny",
            ['data.kind="text"', 'data.paths=["a"]', 'data.tokenizer="t.json"', "data.end_of_text_id=0"],
            "data.end_of_text_id = 0.*is for token files",
        ),
    ],
)
def test_what_cannot_be_is_refused(source: str, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_run_config(source, overrides)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            "gpt-tiny", ["model.attention_dropout=0.1", "parallel.cp=9", "train.seq_len=8", "train.compile=true"]
        )
    for part in ("sequences of 8 tokens", "dropout of attention probabilities", "is not compiled"):
        assert part in str(caught.value)


def test_sequences_without_a_token_for_a_rank_are_one_problem_and_not_one_of_tp() -> None:
    with pytest.raises(ConfigError, match="cannot be cut over 1000 ranks") as caught:
        load_run_config("llama-tiny", ["parallel.cp=1000"])
    assert "parallel.tp" not in str(caught.value)


def test_a_context_section_on_one_rank_has_no_effect_and_is_no_mistake() -> None:
    assert load_run_config("llama-tiny", ["context.method=all_gather"]).parallel.cp == 1
