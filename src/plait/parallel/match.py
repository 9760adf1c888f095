"""Reading a plan against a model: which module has which role, who owns what, and everything that is wrong with it."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from plait.contract.parameter import derive_parameter_ownership
from plait.contract.plan import (
    ROLE_NAMES,
    Activation,
    AttentionCore,
    Column,
    FeatureNorm,
    HeadLocal,
    HeadRows,
    InnerColumn,
    InRegion,
    Plan,
    Positions,
    Role,
    Row,
    TokenLocal,
    VocabEmbedding,
    VocabHead,
    Whole,
    is_match,
    name_role,
)
from plait.errors import ConfigError, ShardingError, describe_nearest
from plait.parallel.context.core import CausalAttention
from plait.parallel.context.sequences import TokenPositions
from plait.parallel.dropout import AttentionDropout, Dropout
from plait.parallel.region.activation import PointwiseActivation
from plait.sharding import Ownership

_EXPECTED: dict[type, tuple[type[nn.Module], ...]] = {
    Column: (nn.Linear,),
    Row: (nn.Linear,),
    VocabHead: (nn.Linear,),
    VocabEmbedding: (nn.Embedding,),
    HeadLocal: (AttentionDropout, nn.Dropout),
    TokenLocal: (nn.Module,),
    Activation: (PointwiseActivation,),
    InnerColumn: (nn.Linear,),
    InRegion: (nn.Module,),
    FeatureNorm: (nn.Module,),
    HeadRows: (nn.Module,),
    AttentionCore: (CausalAttention,),
    Positions: (TokenPositions,),
    Whole: (nn.Module,),
}


def match_roles(model: nn.Module, plan: Plan) -> dict[str, Role]:
    """The role of every module that has one, by each of its names, in the model's order.

    Raises:
        ConfigError: lists every pattern that names no module, module with two roles, wrong module type, and parameter
            or dropout without a role.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    problems: list[str] = []
    roles: dict[str, Role] = {}
    for pattern, role in plan.resolved.items():
        matched = [name for name in names if is_match(pattern, name)]
        if not matched:
            problems.append(_unknown_module(pattern, names))
        for name in matched:
            if roles.setdefault(name, role) != role:
                problems.append(f"{name} has two roles, {name_role(roles[name])} and {name_role(role)}")
            problems += _check_module(name, model.get_submodule(name), role)
    problems += [
        *_list_torn_modules(model, roles),
        *_list_homeless_parameters(model, roles),
        *_list_homeless_dropouts(model, roles),
        *_list_lost_activations(model, roles, plan),
        *_list_empty_regions(names, roles, plan),
    ]
    _raise_all(problems)
    return {name: roles[name] for name in names if name in roles}


def derive_ownership(model: nn.Module, roles: dict[str, Role], degree: int, plan: Plan) -> dict[str, Ownership]:
    """Who owns what of every parameter at `degree` ranks.

    Raises:
        ConfigError: lists every cut that cannot be made and every tied parameter whose two uses cut it differently.
    """
    names = canonical_names(model)
    ownership: dict[str, Ownership] = {}
    problems: list[str] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        role = roles[name.rpartition(".")[0]]
        try:
            record = derive_parameter_ownership(
                names[name], tuple(param.shape), role, degree, sequence_parallel=plan.sequence_parallel
            )
        except ShardingError as error:
            problems.append(f"{error.message} ({error.hint})" if error.hint else error.message)
            continue
        if ownership.setdefault(names[name], record) != record:
            problems.append(f"{name} is tied to {names[name]} but cut differently")
    _raise_all(problems)
    return ownership


def list_gather_groups(roles: dict[str, Role], plan: Plan) -> dict[tuple[str, str], list[str]]:
    """The column modules that share one gather, by the region or else the parent they are in, and group name."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, role in roles.items():
        if isinstance(role, Column) and role.group is not None:
            groups[plan.find_region(name) or name.rpartition(".")[0], role.group].append(name)
    return groups


def find_activation(parent: str, group: str, roles: dict[str, Role]) -> str | None:
    """The module that is called with the outputs of gather group `group` under `parent`, if any has this role."""
    places = (name for name, role in roles.items() if role == Activation(group))
    return next((name for name in places if name.rpartition(".")[0] == parent), None)


def is_region(parent: str, members: Sequence[str], roles: dict[str, Role]) -> bool:
    """Whether `parent` holds these columns and what may stand behind them, and nothing that works on own tokens."""
    prefix = f"{parent}." if parent else ""
    others = [role for name, role in roles.items() if name.startswith(prefix) and name not in members]
    return all(isinstance(role, Row | HeadLocal | Activation | AttentionCore) for role in others)


def drop_aliases(model: nn.Module, roles: dict[str, Role]) -> dict[str, Role]:
    """Each module under the first of its names only."""
    return {name: roles[name] for name, _ in model.named_modules() if name in roles}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name of the parameter behind each name; they differ for a tied one."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    return {name: first[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}


def _unknown_module(pattern: str, names: Iterable[str]) -> str:
    shapes = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names}
    return f"{pattern!r} names no module of the model ({describe_nearest(pattern, shapes)})"


def _check_module(name: str, module: nn.Module, role: Role) -> list[str]:
    expected = _EXPECTED[type(role)]
    if not isinstance(module, expected):
        wanted = " or ".join(kind.__name__ for kind in expected)
        return [f"{name} is a {type(module).__name__}, but role {name_role(role)} needs {wanted}"]
    if isinstance(module, _DropoutNd) and type(module) is not nn.Dropout:
        return [f"{name}: {type(module).__name__} has no parallel twin, of the dropouts only nn.Dropout has"]
    if isinstance(module, nn.Embedding) and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        return [f"{name}: max_norm, sparse and scale_grad_by_freq of nn.Embedding have no parallel twin"]
    if isinstance(role, TokenLocal | InRegion | HeadRows) and any(
        "." in param for param, _ in module.named_parameters()
    ):
        return [
            f"{name}: role {name_role(role)} needs a leaf module, but {type(module).__name__} has parameters below it"
        ]
    return []


def _list_torn_modules(model: nn.Module, roles: dict[str, Role]) -> list[str]:
    first = {module: name for name, module in model.named_modules()}
    shared = [(name, first[module]) for name, module in model.named_modules(remove_duplicate=False)]
    return [
        f"{name} is the same module as {known}, so it needs the same role"
        for name, known in shared
        if roles.get(name) != roles.get(known)
    ]


def _list_homeless_parameters(model: nn.Module, roles: dict[str, Role]) -> list[str]:
    homeless: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, kind = name.rpartition(".")
        if module not in roles:
            homeless[module].append(kind)
    return [
        f"{module or 'the model itself'} has parameters ({', '.join(kinds)}) but no role, so how to reduce their "
        "gradients is unknown"
        for module, kinds in homeless.items()
    ]


def _list_homeless_dropouts(model: nn.Module, roles: dict[str, Role]) -> list[str]:
    return [
        f"{name} is a dropout (p={module.p}) without a role, so what it drops would differ from rank to rank"
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd | Dropout | AttentionDropout) and module.p and name not in roles
    ]


def _list_empty_regions(names: Sequence[str], roles: dict[str, Role], plan: Plan) -> list[str]:
    groups = [place for place, _ in list_gather_groups(roles, plan)]
    problems = [
        f"region {pattern!r} names no module of the model"
        for pattern in plan.regions
        if not any(is_match(pattern, name) for name in names)
    ]
    for name in names:
        count = groups.count(name)
        if plan.find_region(name) == name and count != 1:
            problems.append(f"region {name} has {count} gather groups of columns below it, but its one input needs one")
    return problems


def _list_lost_activations(model: nn.Module, roles: dict[str, Role], plan: Plan) -> list[str]:
    groups, problems = list_gather_groups(roles, plan), []
    for name, role in roles.items():
        module = model.get_submodule(name)
        if not isinstance(role, Activation) or not isinstance(module, PointwiseActivation):
            continue
        columns = groups.get((name.rpartition(".")[0], role.group), [])
        widths = [model.get_submodule(column).get_parameter("weight").shape[0] for column in columns]
        if len(columns) != module.num_inputs or len(set(widths)) > 1:
            found = ", ".join(map("{} [{}]".format, columns, widths)) or "none"
            problems.append(
                f"{name} is called with the outputs of {module.num_inputs} columns of one width, but those of group "
                f"{role.group!r} beside it are: {found}"
            )
    return problems


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ConfigError.from_problems(
            "plan", problems, hint=f"roles are {', '.join(ROLE_NAMES.values())}; see plait.contract.plan"
        )
