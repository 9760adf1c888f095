"""What `parallelize` makes of a plan, and what it refuses; no rank is needed for either."""

import re

import pytest
import torch
from torch import nn

import plait
from plait.contract.plan import Column, HeadLocal, Plan, Row, TokenLocal
from plait.errors import ConfigError
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.dropout import AttentionDropout, Dropout
from plait.parallel.shard import shard_tensor
from plait.sharding import Columns, KeyValueHeads, QueryHeads, Shard
from tests.support.lone_mesh import build_lone_mesh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 10)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(10, 8, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


ROLES = {
    "embedding": "vocab_embedding",
    "blocks.*.norm": "token_local",
    "blocks.*.up": "column",
    "blocks.*.drop": "token_local",
    "blocks.*.down": "row",
    "head": "vocab_head",
}


def test_every_rank_holds_its_part_under_the_same_names():
    whole = Model()
    names = [name for name, _ in whole.named_parameters()]
    parts = [parallelize(Model(), build_lone_mesh(3, rank), Plan(ROLES)) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert [name for name, _ in part.named_parameters()] == names
        for name, param in part.named_parameters():
            assert tuple(param.shape) == ownership_of(part)[name].local_shape(rank)
    assert [part.blocks[1].up.weight.shape[0] for part in parts] == [4, 3, 3]


def test_values_are_cut_from_the_whole():
    whole, part = Model(), Model()
    part.load_state_dict(whole.state_dict())
    parallelize(part, build_lone_mesh(3, 1), Plan(ROLES))
    for name, param in part.named_parameters():
        assert torch.equal(param, shard_tensor(whole.get_parameter(name), ownership_of(part)[name], 1))
    assert part.blocks[0].up.weight.is_contiguous()


def test_a_frozen_parameter_stays_frozen():
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    parallelize(model, build_lone_mesh(2), Plan(ROLES))
    assert not model.blocks[0].up.weight.requires_grad
    assert model.blocks[1].up.weight.requires_grad


def test_a_model_on_the_meta_device_is_cut_without_memory():
    with torch.device("meta"):
        model = Model()
    parallelize(model, build_lone_mesh(2), Plan(ROLES))
    assert all(param.is_meta for param in model.parameters())
    assert model.embedding.weight.shape == (6, 8)


def test_torch_dropout_becomes_the_one_keyed_by_token():
    model = parallelize(Model(), build_lone_mesh(2), Plan(ROLES, sequence_parallel=False))
    assert isinstance(model.blocks[0].drop, Dropout)
    assert model.blocks[0].drop.p == 0.1


def test_without_other_ranks_the_model_stays_as_it_is():
    model = parallelize(Model(), build_lone_mesh(1), Plan(ROLES))
    assert type(model.blocks[0].up) is nn.Linear
    assert ownership_of(model)["blocks.0.up.weight"].placement == Shard(0)


def refuse(roles: dict, match: str, *, tp: int = 2) -> None:
    with pytest.raises(ConfigError, match=match):
        parallelize(Model(), build_lone_mesh(tp), Plan(roles))


def test_unknown_module_names_its_nearest():
    wanted = "'blocks.*.upp' names no module of the model (did you mean \"blocks.*.up\"?)"
    refuse({**ROLES, "blocks.*.upp": "column"}, re.escape(wanted))


def test_unknown_role_names_its_nearest():
    with pytest.raises(ConfigError, match=r'unknown role .colum.\s+hint: did you mean "column"'):
        Plan({"up": "colum"})


def test_role_without_its_arguments_or_its_parentheses_is_refused():
    with pytest.raises(ConfigError, match=r"'drop' has role 'head_local', which has to know the heads\s+hint: as in"):
        Plan({"drop": "head_local"})
    with pytest.raises(ConfigError, match=r"'up' has role <class .*Column'>, which is not one\s+hint: as in Column\("):
        Plan({"up": Column})


def test_parameter_without_a_role_is_refused():
    """FIELD 3.6, 3.8: nothing leaves the typed world, no gradient without a stated reduction."""
    roles = {path: role for path, role in ROLES.items() if path != "blocks.*.norm"}
    refuse(roles, r"blocks\.0\.norm has parameters \(weight, bias\) but no role")


def test_wrong_module_type_is_refused():
    wanted = "up is a Linear, but role vocab_embedding needs Embedding"
    refuse({**ROLES, "blocks.*.up": "vocab_embedding"}, wanted)


def test_two_roles_for_one_module_are_refused():
    refuse({**ROLES, "blocks.0.up": "row"}, "blocks.0.up has two roles, column and row")


def test_a_module_under_two_names_has_one_role():
    model = Model()
    model.last = model.blocks[0].up
    with pytest.raises(ConfigError, match="last is the same module as blocks.0.up, so it needs the same role"):
        parallelize(model, build_lone_mesh(2), Plan(ROLES | {"last": "row"}))


def test_degree_that_leaves_a_rank_empty_is_refused():
    refuse(ROLES, "10 features in units of 1 cannot be cut over 11 ranks.*at most 10", tp=11)


def test_tied_parameter_must_be_cut_one_way():
    refuse({**ROLES, "head": Row()}, "head.weight is tied to embedding.weight but cut differently")


def test_heads_that_do_not_fit_the_weight_are_refused():
    refuse({**ROLES, "blocks.*.up": Column(KeyValueHeads(4, 2, 4))}, "10 features are not 2 heads of width 4")


def test_module_with_parameters_below_it_is_no_leaf():
    refuse({**ROLES, "blocks.*": TokenLocal()}, "needs a leaf module")


def test_all_problems_come_at_once():
    roles = {**ROLES, "nothing": "row", "blocks.*.up": Column(Columns(unit=3)), "head": "row"}
    del roles["blocks.*.down"]
    with pytest.raises(ConfigError) as refused:
        parallelize(Model(), build_lone_mesh(2), Plan(roles))
    assert "'nothing'" in str(refused.value)
    assert "blocks.1.down" in str(refused.value)


def test_a_parallel_model_is_not_cut_again():
    model = parallelize(Model(), build_lone_mesh(2), Plan(ROLES))
    with pytest.raises(ConfigError, match="parallel already"):
        parallelize(model, build_lone_mesh(2), Plan(ROLES))


def test_nothing_is_changed_by_a_refused_plan():
    model = Model()
    with pytest.raises(ConfigError):
        parallelize(model, build_lone_mesh(11), Plan(ROLES))
    assert type(model.blocks[0].up) is nn.Linear
    assert type(model.blocks[0].norm) is nn.LayerNorm


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_of_attention_becomes_the_one_keyed_by_head(tp):
    """FIELD 3.15: on one rank too, so that every degree drops the same."""
    model = nn.ModuleDict({"drop": nn.Dropout(0.2).eval()})
    parallelize(model, build_lone_mesh(tp), Plan({"drop": HeadLocal(QueryHeads(4, 2, 3))}))
    assert isinstance(model["drop"], AttentionDropout)
    assert (model["drop"].p, model["drop"].training) == (0.2, False)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.1), Dropout(0.1), AttentionDropout(0.1)], ids=repr)
def test_dropout_without_a_role_is_refused(dropout):
    """FIELD 3.15: what it drops would depend on the rank and on how many there are."""
    model = Model()
    model.extra = dropout
    with pytest.raises(ConfigError, match=r"extra is a dropout \(p=0\.1\) without a role"):
        parallelize(model, build_lone_mesh(2), Plan(ROLES))
    dropout.p = 0.0
    parallelize(model, build_lone_mesh(2), Plan(ROLES))


def test_dropout_of_whole_features_is_refused():
    with pytest.raises(ConfigError, match="drop: Dropout1d has no parallel twin"):
        parallelize(nn.ModuleDict({"drop": nn.Dropout1d()}), build_lone_mesh(2), Plan({"drop": "token_local"}))


def test_a_model_around_a_parallel_one_is_not_taken_for_unsharded():
    """FIELD 3.11: its gradient norm would count the parts of one rank as the whole."""
    around = nn.ModuleDict({"backbone": parallelize(Model(), build_lone_mesh(2), Plan(ROLES))})
    with pytest.raises(ConfigError, match="backbone of this ModuleDict is parallel, the module around it is not"):
        plait.clip_grad_norm_(around, 1.0)


@pytest.mark.parametrize(
    ("roles", "found"),
    [
        ({"up": Column()}, "none"),
        ({"up": Column(group="in")}, r"up \[8\]"),
        ({"up": Column(group="in"), "narrow": Column(group="in")}, r"up \[8\], narrow \[4\]"),
    ],
    ids=["no group", "one column", "two widths"],
)
def test_an_activation_needs_the_columns_it_reads(roles, found):
    model = nn.ModuleDict({"activation": plait.SwiGLU()} | {name: nn.Linear(3, 8) for name in roles})
    if "narrow" in roles:
        model["narrow"] = nn.Linear(3, 4)
    plan = Plan({**roles, "activation": plait.Activation("in")})
    with pytest.raises(ConfigError, match=f"2 columns of one width, but those of group 'in' beside it are: {found}\n"):
        parallelize(model, build_lone_mesh(2), plan)


def test_an_activation_that_is_no_module_of_ours_is_refused():
    """A torch module does not say how its gradients are computed rows by rows."""
    model = nn.ModuleDict({"up": nn.Linear(3, 8), "activation": nn.GELU()})
    plan = Plan({"up": Column(group="in"), "activation": plait.Activation("in")})
    with pytest.raises(ConfigError, match="activation is a GELU, but role activation needs PointwiseActivation"):
        parallelize(model, build_lone_mesh(2), plan)
