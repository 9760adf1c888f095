from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.parallel import ParallelConfig
from plait.config.presets import list_presets, load_preset
from plait.config.run import RunConfig
from plait.contract.model import derive_model, derive_ownership, derive_plan
from plait.contract.plan import Activation, AttentionCore, Column, Positions, Row, TokenLocal, VocabEmbedding, VocabHead
from plait.contract.setting import Setting
from plait.contract.step import sum_flops
from plait.errors import ShardingError

TINY = {"num_layers": 2, "width": 64, "vocab_size": 256, "max_seq_len": 64}
GROUPED = LlamaConfig(**TINY, num_heads=8, num_kv_heads=2, mlp_width=96, qkv_bias=True)
GPT = GptConfig(**TINY, num_heads=8, dropout=0.1, attention_dropout=0.1)


def test_the_plan_of_llama_names_every_module_that_has_parameters() -> None:
    roles = derive_plan(GROUPED).resolved
    with_parameters = {Activation, Column, Row, TokenLocal, VocabEmbedding, VocabHead}
    assert {type(role) for role in roles.values()} == {*with_parameters, AttentionCore, Positions}
    groups = {path: role.group for path, role in roles.items() if isinstance(role, Column)}
    assert groups == {
        "layers.*.attention.wq": "qkv",
        "layers.*.attention.wk": "qkv",
        "layers.*.attention.wv": "qkv",
        "layers.*.mlp.w_gate": "gate_up",
        "layers.*.mlp.w_up": "gate_up",
    }


@pytest.mark.parametrize(("config", "columns"), [(GROUPED, ["w_gate", "w_up"]), (GPT, ["w_up"])], ids=["gated", "not"])
def test_the_activation_of_an_mlp_reads_every_column_of_its_group(config: ModelConfig, columns: list[str]) -> None:
    roles = derive_plan(config).resolved
    activation = roles["layers.*.mlp.activation"]
    assert isinstance(activation, Activation)
    group = [path for path, role in roles.items() if isinstance(role, Column) and role.group == activation.group]
    assert sorted(group) == [f"layers.*.mlp.{column}" for column in columns]


@pytest.mark.parametrize("preset", list_presets())
def test_elements_counted_on_the_ranks_are_the_parameters_of_the_model(preset: str) -> None:
    """FIELD 3.11: each element is counted once, whoever else holds it."""
    config = load_preset(preset)
    tp = min(8, config.num_heads)
    counted = sum(
        prod(own.local_shape(rank))
        for own in derive_ownership(config, tp).values()
        for rank in range(tp)
        if own.is_counted_on(rank)
    )
    assert counted == config.num_parameters


def test_eight_heads_over_three_ranks() -> None:
    """FIELD 3.23: uneven by whole KV groups, exact."""
    config = GROUPED.model_copy(update={"num_kv_heads": 8})
    own = derive_ownership(config, 3)["layers.1.attention.wk.weight"]
    assert [own.local_shape(rank) for rank in range(3)] == [(24, 64), (24, 64), (16, 64)]
    assert own.reduced_over is None


def test_a_vocabulary_of_32003_over_two_ranks_has_no_padding() -> None:
    """FIELD 3.3 and 3.24: the true vocabulary in every shard, uneven where it does not divide."""
    own = derive_ownership(GPT.model_copy(update={"vocab_size": 32_003}), 2)["embedding.weight"]
    assert [str(own.intervals(rank)[0]) for rank in range(2)] == ["0:16002", "16002:32003"]


def test_kv_heads_below_the_degree_are_held_by_subgroups_that_sum_their_gradients() -> None:
    """FIELD 3.10 and 3.22: replication of KV heads is part of the record."""
    ownership = derive_ownership(GROUPED, 4)
    for name in ("wk.weight", "wk.bias", "wv.weight", "wv.bias"):
        own = ownership[f"layers.0.attention.{name}"]
        assert own.reduced_over == "tp/kv"
        assert [str(own.intervals(rank)[0]) for rank in range(4)] == ["0:8", "0:8", "8:16", "8:16"]
        assert [own.is_counted_on(rank) for rank in range(4)] == [True, False, True, False]
    assert ownership["layers.0.attention.wq.weight"].reduced_over is None


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_sum_their_gradients_over_tp_where_tokens_are_sharded(sequence_parallel: bool) -> None:
    """FIELD 3.8: the layer owns its gradient reduction."""
    ownership = derive_ownership(GPT, 2, sequence_parallel=sequence_parallel)
    summed = {name for name, own in ownership.items() if own.reduced_over == "tp"}
    norms = {name for name in ownership if "norm" in name or name.startswith("position_embedding")}
    assert summed == (norms if sequence_parallel else set())


def test_a_row_bias_is_whole_and_needs_no_reduction() -> None:
    """FIELD 3.16: it is added once, after the reduction, so its gradient is whole on every rank."""
    own = derive_ownership(GPT, 4)["layers.0.attention.wo.bias"]
    assert (own.dim, own.reduced_over) == (None, None)


def test_tied_embeddings_are_one_parameter_with_two_uses() -> None:
    """FIELD 3.27."""
    contract = derive_model(GPT, Setting(1, 64, tp=2))
    assert "head.weight" not in derive_ownership(GPT, 2)
    used = [p.ownership.name for op in (*contract.entry, *contract.exit) for p in op.parameters]
    assert used.count("embedding.weight") == 2
    untied = derive_model(GPT.model_copy(update={"tied_embeddings": False}), Setting(1, 64, tp=2))
    assert untied.num_parameters - contract.num_parameters == 256 * 64 // 2


def test_a_degree_that_cannot_be_realised_names_the_parameter() -> None:
    with pytest.raises(ShardingError, match=r"layers\.0\.attention\.wq\.weight \[64, 64\]: 8 query heads .* 9 ranks"):
        derive_ownership(GROUPED, 9)


def _is_accepted(build: Callable[[], object]) -> bool:
    try:
        build()
    except ValueError:
        return False
    return True


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_a_config_accepts_exactly_the_degrees_that_can_be_realised(
    num_kv_heads: int, group: int, mlp_width: int, vocab_size: int, tp: int
) -> None:
    """FIELD 3.22: what no plan can realise is refused with the config, before anything runs."""
    model = LlamaConfig(
        num_layers=1,
        width=8,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_width=2,
        mlp_width=mlp_width,
        vocab_size=vocab_size,
        max_seq_len=64,
    )
    is_accepted = _is_accepted(lambda: RunConfig(model=model, parallel=ParallelConfig(tp=tp)))
    assert is_accepted == _is_accepted(lambda: derive_ownership(model, tp))


@pytest.mark.parametrize("config", [GROUPED, GPT])
def test_one_rank_issues_nothing(config: LlamaConfig | GptConfig) -> None:
    contract = derive_model(config, Setting(2, 16))
    assert contract.micro_batch_collectives == ()
    assert contract.num_parameters == config.num_parameters


def test_forward_and_backward_in_order_of_issue() -> None:
    """The backward of the model is that of its operations in reverse, and starts at the head."""
    contract = derive_model(GPT, Setting(1, 64, tp=2))
    forward, backward = (
        [f"{c.kind} {list(c.shape)}" for c in collectives]
        for collectives in (contract.forward_collectives, contract.backward_collectives)
    )
    gather, scatter = "all_gather [64, 64]", "reduce_scatter [64, 64]"
    assert forward == [scatter, *[gather, scatter] * 4, gather]
    norm, column, row = "all_reduce [128]", [gather, scatter], gather
    block = [row, *column, norm] * 2
    assert backward == [*column, norm, *block, *block, "all_reduce [4096]", row]


@pytest.mark.parametrize(("rank", "shared_by"), [(0, 2), (1, 2), (2, 1)])
def test_only_ranks_that_share_a_kv_head_sum_its_gradient(rank: int, shared_by: int) -> None:
    """Two KV heads over three ranks: two ranks share the first, weight before bias, key before value."""
    contract = derive_model(GROUPED, Setting(1, 64, tp=3, rank=rank))
    over_subgroup = [c for c in contract.backward_collectives if c.axis == "tp/kv"]
    shapes = [c.shape for c in over_subgroup]
    assert shapes == ([(8, 64), (8,)] * 2 * GROUPED.num_layers if shared_by > 1 else [])
    assert {c.degree for c in over_subgroup} <= {2}


def test_sums_are_carried_in_the_declared_dtype_and_gathers_in_that_of_compute() -> None:
    """FIELD 3.18: the reduction dtype is one stated policy per collective."""
    contract = derive_model(GROUPED, Setting(1, 64, tp=4, dtype="bfloat16", reduce_dtype="float32"))
    kinds = {(c.kind, c.dtype) for c in (*contract.forward_collectives, *contract.backward_collectives)}
    assert kinds == {("all_gather", "bfloat16"), ("reduce_scatter", "float32"), ("all_reduce", "float32")}


@given(st.integers(1, 8), st.integers(1, 3), st.integers(8, 40), st.booleans(), st.sampled_from([GROUPED, GPT]))
def test_ranks_together_do_what_one_rank_does(
    tp: int, batch: int, seq_len: int, sequence_parallel: bool, config: LlamaConfig | GptConfig
) -> None:
    """FLOPs and outputs of every operation add up to those of one rank, but for KV heads that several ranks hold."""
    whole = derive_model(config, Setting(batch, seq_len))
    ranks = [
        derive_model(config, Setting(batch, seq_len, tp, rank, sequence_parallel=sequence_parallel))
        for rank in range(tp)
    ]
    for position, op in enumerate(whole.ops):
        own = [contract.ops[position] for contract in ranks]
        layouts = [output.layout for output in own[0].outputs]
        assert [layout.shape for layout in layouts] == [output.layout.shape for output in op.outputs]
        held = [sum(layout.local_numel(rank) for rank in range(tp)) for layout in layouts]
        for layout, numel in zip(layouts, held, strict=True):
            copies = 1 if layout.split else tp
            has_shared_heads = layout.split is not None and layout.split.is_replicated
            assert numel > prod(layout.shape) if has_shared_heads else numel == copies * prod(layout.shape)
        flops = sum(sum_flops(each.forward) + sum_flops(each.backward) for each in own)
        expected = sum_flops(op.forward) + sum_flops(op.backward)
        has_shared_heads = any(layout.split and layout.split.is_replicated for layout in layouts)
        assert flops > expected if has_shared_heads else flops == expected


@given(st.integers(2, 8), st.integers(8, 40), st.sampled_from([GROUPED, GPT]))
def test_payloads_do_not_depend_on_the_degree_and_what_is_sent_grows_to_the_payload(
    tp: int, tokens: int, config: LlamaConfig | GptConfig
) -> None:
    collectives, of_two = (
        [c for c in derive_model(config, Setting(1, tokens, degree)).micro_batch_collectives if c.axis == "tp"]
        for degree in (tp, 2)
    )
    assert [c.payload_bytes for c in collectives] == [c.payload_bytes for c in of_two]
    for collective, other in zip(collectives, of_two, strict=True):
        assert other.wire_bytes_per_rank <= collective.wire_bytes_per_rank < 2 * collective.payload_bytes


@given(st.integers(2, 8), st.integers(8, 40), st.sampled_from([GROUPED, GPT]))
def test_every_reduce_scatter_has_an_all_gather_as_its_conjugate(
    tp: int, tokens: int, config: LlamaConfig | GptConfig
) -> None:
    """Backward of an operation holds the conjugates of its forward, and each forward gather once more."""
    for op in derive_model(config, Setting(1, tokens, tp)).ops[:-1]:
        forward, backward = (
            [move.collective for move in steps if hasattr(move, "collective") and move.tensor in ("x", "y", "dx", "dy")]
            for steps in (op.forward, op.backward)
        )
        conjugates = {"all_gather": ["reduce_scatter"], "reduce_scatter": ["all_gather"]}
        again = [c.kind for c in forward if c.kind == "all_gather"]
        expected = sorted([kind for c in forward for kind in conjugates[c.kind]] + again)
        assert sorted(c.kind for c in backward) == expected
        assert {c.shape for c in forward} == {c.shape for c in backward}
