"""The worked examples of three texts on tensor and sequence parallelism, as the contracts compute them.

A lesson that derives shapes and collectives of parallel linears, an encyclopedia entry with the costs of a layer,
and an article on collective GEMMs that states which collectives stand at the boundaries.
"""

from math import prod

import pytest

from plait.config.model import GptConfig, LlamaConfig
from plait.contract.block import derive_block
from plait.contract.model import derive_model, derive_ownership
from plait.contract.op import Op
from plait.contract.report.linear import Declaration, DeclaredLayout, LinearKind, LinearShape, derive_linear_cases
from plait.contract.report.tally import build_tally
from plait.contract.setting import Setting
from plait.contract.step import list_collectives, list_gemms
from plait.sharding import Kind

GPT = GptConfig(num_layers=2, width=8192, num_heads=64, vocab_size=51_200, max_seq_len=4096)
GATED_MLP = LlamaConfig(
    num_layers=1, width=4096, num_heads=32, num_kv_heads=32, mlp_width=16_384, vocab_size=32_000, max_seq_len=8192
)
COLUMN = Declaration(LinearKind.COLUMN, DeclaredLayout.REPLICATED, DeclaredLayout.FEATURE_SHARDED)
ROW = Declaration(LinearKind.ROW, DeclaredLayout.FEATURE_SHARDED, DeclaredLayout.REPLICATED)


def derive_ops(config: GptConfig | LlamaConfig, setting: Setting) -> dict[str, Op]:
    ownership = derive_ownership(config, setting.tp, sequence_parallel=setting.sequence_parallel)
    return {op.name.removeprefix("layers.0."): op for op in derive_block(config, setting, ownership, {}, 0)}


def kinds(op: Op) -> tuple[list[str], list[str]]:
    return [c.kind for c in list_collectives(op.forward)], [c.kind for c in list_collectives(op.backward)]


class TestLesson:
    """X[8192, 8192] times W[8192, 32768], and the gated MLP of width 4096 and 16384, over four ranks."""

    def derive(self, declaration: Declaration, tp: int = 4) -> Op:
        return derive_linear_cases(LinearShape(8192, 8192, 32_768), [tp], declaration, "bfloat16")[0].ops[0]

    def test_column_parallel_shards(self) -> None:
        op = self.derive(COLUMN)
        (weight,) = op.parameters
        assert weight.layout.local_shape(3) == (8192, 8192)
        assert [str(own.intervals(3)[0]) for own in [weight.ownership]] == ["24576:32768"]
        assert op.inputs[0].layout.local_shape(3) == (8192, 8192)
        assert op.outputs[0].layout.local_shape(3) == (8192, 8192)

    def test_column_parallel_needs_no_reduction_forward_and_one_of_the_input_gradient_backward(self) -> None:
        op = self.derive(COLUMN)
        assert kinds(op) == ([], ["all_reduce"])
        assert list_collectives(op.backward)[0].shape == (8192, 8192)

    def test_a_full_output_takes_an_all_gather(self) -> None:
        op = self.derive(Declaration(LinearKind.COLUMN, DeclaredLayout.REPLICATED, DeclaredLayout.REPLICATED))
        assert kinds(op) == (["all_gather"], ["all_reduce"])
        (gather,) = list_collectives(op.forward)
        assert (gather.shape, gather.dim) == ((8192, 32_768), 1)

    def test_row_parallel_with_replicated_output_reduces_forward_only(self) -> None:
        op = self.derive(ROW)
        assert op.parameters[0].layout.local_shape(0) == (32_768, 2048)
        assert kinds(op) == (["all_reduce"], [])

    def test_row_parallel_with_token_sharded_output_gathers_its_gradient(self) -> None:
        op = self.derive(Declaration(LinearKind.ROW, DeclaredLayout.FEATURE_SHARDED, DeclaredLayout.TOKEN_SHARDED))
        assert kinds(op) == (["reduce_scatter"], ["all_gather"])
        assert op.outputs[0].layout.local_shape(1) == (2048, 32_768)

    @pytest.mark.parametrize("tp", [1, 2, 4, 8])
    def test_a_higher_degree_narrows_n_of_a_column_and_k_of_a_row(self, tp: int) -> None:
        column = list_gemms(self.derive(COLUMN, tp).forward)[0]
        row = list_gemms(self.derive(ROW, tp).forward)[0]
        assert (column.m, column.k, column.n) == (8192, 8192, 32_768 // tp)
        assert (row.m, row.k, row.n) == (8192, 8192 // tp, 32_768)

    def test_the_mlp_pair_keeps_the_expansion_local(self) -> None:
        ops = derive_ops(GATED_MLP, Setting(1, 8192, tp=4, sequence_parallel=False))
        expand, contract = ops["mlp.w_gate|w_up"], ops["mlp.w_down"]
        assert [p.layout.local_shape(0) for p in expand.parameters] == [(4096, 4096), (4096, 4096)]
        assert [y.layout.local_shape(0) for y in expand.outputs] == [(8192, 4096), (8192, 4096)]
        assert contract.parameters[0].layout.local_shape(0) == (4096, 4096)
        assert kinds(expand)[0] == []
        assert kinds(contract)[1] == []

    @pytest.mark.parametrize(("sequence_parallel", "kind"), [(False, "all_reduce"), (True, "reduce_scatter")])
    def test_the_partial_output_is_67_megabytes(self, sequence_parallel: bool, kind: str) -> None:
        op = derive_ops(GATED_MLP, Setting(1, 8192, tp=4, sequence_parallel=sequence_parallel))["mlp.w_down"]
        (reduction,) = list_collectives(op.forward)
        assert (reduction.kind, reduction.shape, reduction.dtype) == (kind, (8192, 4096), "bfloat16")
        assert reduction.payload_bytes == 67_108_864

    def test_degree_eight_halves_the_shard_of_the_expansion(self) -> None:
        op = derive_ops(GATED_MLP, Setting(1, 8192, tp=8))["mlp.w_down"]
        assert op.parameters[0].layout.local_shape(0) == (4096, 2048)


class TestEntry:
    """Costs per transformer layer: b = 1, s = 4096, h = 8192, t = 8."""

    def test_flops_of_a_layer_forward_are_24bsh2_plus_4bs2h(self) -> None:
        b, s, h = 3, 512, GPT.width
        tally = build_tally(derive_ops(GPT, Setting(b, s)).values())
        assert tally.forward_flops == 24 * b * s * h**2 + 4 * b * s**2 * h
        assert tally.backward_flops == 2 * tally.forward_flops

    @pytest.mark.parametrize("tp", [2, 8, 64])
    def test_flops_divide_by_the_degree(self, tp: int) -> None:
        whole, own = (build_tally(derive_ops(GPT, Setting(1, 4096, degree)).values()) for degree in (1, tp))
        assert own.forward_flops * tp == whole.forward_flops

    def test_a_layer_takes_four_all_reduces_of_2bsh_bytes_a_step(self) -> None:
        b, s, h = 1, 4096, GPT.width
        ops = derive_ops(GPT, Setting(b, s, tp=8, sequence_parallel=False)).values()
        forward = [c for op in ops for c in list_collectives(op.forward)]
        backward = [c for op in ops for c in list_collectives(op.backward)]
        assert len(forward) == len(backward) == 2
        assert {c.kind for c in forward + backward} == {Kind.ALL_REDUCE}
        assert {c.payload_bytes for c in forward + backward} == {2 * b * s * h} == {67_108_864}

    def test_the_loss_reduces_row_maxima_and_sums_and_never_gathers_logits(self) -> None:
        loss = derive_model(GPT, Setting(1, 4096, tp=8)).loss
        forward = list_collectives(loss.forward)
        assert [(c.kind, c.op, c.shape) for c in forward] == [
            ("all_reduce", "max", (4096,)),
            ("all_reduce", "sum", (2, 4096)),
        ]
        assert loss.backward == ()
        assert all(prod(c.shape) < 4096 * GPT.vocab_size // 8 for c in forward)

    def test_the_embedding_reduces_what_each_rank_looked_up(self) -> None:
        embedding = derive_model(GPT, Setting(1, 4096, tp=8, sequence_parallel=False)).entry[0]
        assert embedding.parameters[0].layout.local_shape(0) == (6400, 8192)
        assert kinds(embedding) == (["all_reduce"], [])


class TestArticle:
    """Sequence parallelism: an all-gather enters a region, a reduce-scatter leaves it; backward they trade places."""

    OPS = derive_ops(GPT, Setting(1, 4096, tp=4))

    def test_regions_alternate(self) -> None:
        forward = [c.kind for op in self.OPS.values() for c in list_collectives(op.forward)]
        assert forward == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]

    def test_backward_has_the_conjugates_and_gathers_the_input_again(self) -> None:
        again = "all_gather"
        expected = ["all_gather", again, "reduce_scatter"] * 2
        activations = [
            c.kind for op in reversed(self.OPS.values()) for c in list_collectives(op.backward) if len(c.shape) > 1
        ]
        assert activations == expected

    def test_activations_are_cut_along_tokens_outside_and_along_features_inside(self) -> None:
        assert str(self.OPS["attention_norm"].outputs[0].layout) == "[T/tp, D]"
        assert str(self.OPS["mlp.w_up"].outputs[0].layout) == "[T, F/tp]"
        assert str(self.OPS["mlp.w_down"].outputs[0].layout) == "[T/tp, D]"

    def test_communication_is_that_of_all_reduce_mode_but_for_the_gathers_again(self) -> None:
        """An all-reduce is a reduce-scatter and an all-gather; the inputs of the two regions are gathered once more."""
        sent = {}
        for mode in (True, False):
            tally = build_tally(derive_ops(GPT, Setting(1, 4096, tp=4, sequence_parallel=mode)).values())
            sent[mode] = tally.forward.sent_bytes + tally.backward.sent_bytes
        again = 2 * 4096 * 8192 * 2 * 3 // 4
        norms = 2 * 2 * (2 * 8192 * 2) * 3 // 4
        assert sent[True] == sent[False] + again + norms
