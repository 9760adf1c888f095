"""Reading the rules of a Hugging Face model: the role of every module, and everything that is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plait.contract.plan import (
    Column,
    FeatureNorm,
    HeadLocal,
    HeadRows,
    InRegion,
    Role,
    Row,
    TokenLocal,
    VocabEmbedding,
    VocabHead,
    Whole,
    is_match,
)
from plait.hf import architecture
from plait.hf.finding import COLUMN_RULES, GROUP, ROW_RULES, WHOLE_RULES, Finding, generic, is_norm
from plait.hf.heads import KEY_VALUE, HeadCount, count_heads
from plait.hf.lora import layers
from plait.hf.packed import Part, is_linear, linear_shape
from plait.sharding import Columns, Cut

_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts", "grouped_gemm")
_NO_EXPERTS = "mixtures of experts have no parallel twin"

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
"""A region with one of these columns is an attention."""

_KNOWN = (*COLUMN_RULES, *ROW_RULES, *WHOLE_RULES, "embedding_rowwise")
"""Rules of modules that can be followed."""


@dataclass
class Reading:
    """One model and its rules.

    Attributes:
        allowed: patterns of modules that may stay whole although they are large, and of rules that may match nothing.
        findings: by module path; parts of packed linears are modules of their own.
        parts: of each packed linear.
        heads: of each attention region.
        problems: everything that is wrong.
    """

    model: Any
    rules: dict[str, str]
    allowed: Sequence[str]
    base: str
    layers: str
    regions: tuple[str, ...]
    findings: dict[str, Finding] = field(default_factory=dict)
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    heads: dict[str, HeadCount] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Find the role of every module that needs one."""
        self._check_rules()
        if self.problems and self.problems[0].endswith(_NO_EXPERTS):
            return
        self._count_heads()
        self.problems += layers.list_config_problems(self.model)
        adapted = dict(layers.list_adapted(self.model))
        inside = tuple(f"{name}." for name in adapted)
        for name, module in self.model.named_modules():
            holds = [param for param, _ in module.named_parameters(recurse=False)]
            if name in adapted:
                self._read_adapted(name, module)
            elif name and (holds or isinstance(module, nn.Dropout)) and not name.startswith(inside):
                self._read_module(name, module, holds)

    def _check_rules(self) -> None:
        experts = [pattern for pattern, rule in self.rules.items() if rule in _EXPERTS and self._find(pattern)]
        if experts:
            kind = type(self.model.get_submodule(str(self._find(experts[0])))).__name__
            rule = self.rules[experts[0]]
            self.problems = [f"rule {rule!r} of {experts[0]} ({kind}): {_NO_EXPERTS}"]
            return
        names = {generic(name) for name, _ in self.model.named_modules()}
        params = {generic(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for pattern, rule in self.rules.items():
            if self._is_allowed(pattern):
                continue
            if pattern in params:
                owner = self.model.get_submodule(str(self._find(pattern)).rpartition(".")[0])
                self.problems.append(
                    f"rule {rule!r} of {pattern}, a parameter of {type(owner).__name__}, has no parallel twin"
                )
            elif pattern not in names:
                self.problems.append(f"rule {rule!r} of {pattern} matches no module of this model")
            elif rule not in _KNOWN:
                module = self.model.get_submodule(str(self._find(pattern)))
                self.problems.append(f"rule {rule!r} of {pattern} ({type(module).__name__}) has no parallel twin")

    def _count_heads(self) -> None:
        for name, module in self.model.named_modules():
            if generic(name) in self.regions and any(hasattr(module, leaf) for leaf in _ATTENTION):
                self.heads[name] = count_heads(module, self.model.config)

    def _read_module(self, name: str, module: nn.Module, holds: list[str]) -> None:
        rule = self.rules.get(generic(name))
        if module is self.model.get_input_embeddings():
            finding: Finding | None = Finding(VocabEmbedding(), rule or "input embedding")
        elif module is self.model.get_output_embeddings():
            finding = Finding(VocabHead(), rule or "output embedding")
        elif isinstance(module, nn.Dropout):
            finding = self._read_dropout(name)
        elif any(True for _ in module.children()):
            self.problems.append(
                f"{generic(name)} ({type(module).__name__}) has parameters of its own ({', '.join(holds)})"
            )
            return
        elif is_linear(module) and (rule in COLUMN_RULES or rule in ROW_RULES):
            finding = self._read_linear(name, module, str(rule))
        elif rule in _KNOWN or rule is None:
            finding = self._read_whole(name, module, holds, rule)
        else:
            return
        if finding is not None:
            self.findings[name] = finding

    def _read_adapted(self, name: str, layer: nn.Module) -> None:
        """A linear with adapters: read as the linear that it is without, which then is one name further down."""
        base, known, problems = layers.find_base(layer), set(self.findings), list(layers.list_problems(name, layer))
        self.problems += problems
        if problems:
            return
        if layer in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            self.problems.append(f"{generic(name)} has adapters, which have a parallel form in the layers alone")
            return
        self._read_module(name, base, [param for param, _ in base.named_parameters(recurse=False)])
        bare = {path: self.findings.pop(path) for path in [*self.findings] if path not in known}
        for path, role in layers.derive_roles(name, layer, {path: each.role for path, each in bare.items()}).items():
            whole = "adapter: every rank uses it on its own part" if isinstance(role, InRegion | TokenLocal) else None
            own = bare.get(layers.find_plain_name(path))
            self.findings[path] = Finding(role, "adapter" if own is None else own.why, whole)
        if name in self.parts:
            parts = self.parts.pop(name)
            self.parts |= dict.fromkeys(layers.list_packed(name, layer), parts)

    def _read_linear(self, name: str, module: nn.Module, rule: str) -> Finding | None:
        region = self._region(name)
        if region is None:
            self.problems.append(f"rule {rule!r} of {generic(name)} is outside of the layers {self.layers}.*")
            return None
        owner = type(self.model.get_submodule(region)).__name__
        if owner in architecture.INTERLEAVED:
            self.problems.append(f"{self._describe(region)} interleaves its heads in a way that has no parallel twin")
            return None
        parts = self._find_parts(name, module)
        is_gathered = rule not in ("colwise", "rowwise")
        if is_gathered and not self._is_cut_all_the_same(region):
            self.problems.append(f"rule {rule!r} of {generic(name)} has no parallel twin in {self._describe(region)}")
            return None
        out_features, in_features = linear_shape(module)
        if rule in ROW_RULES:
            return Finding(Row(self._cut(region, name, in_features)), rule)
        if not parts:
            return Finding(Column(self._cut(region, name, out_features), GROUP), rule)
        self.parts[name] = parts
        for part in parts:
            path = f"{name}.{part.name}"
            self.findings[path] = Finding(Column(self._cut(region, path, part.features), GROUP), f"{rule}, packed")
        return None

    def _find_parts(self, name: str, module: nn.Module) -> tuple[Part, ...]:
        above, _, leaf = name.rpartition(".")
        region = self._region(name)
        heads = None if region is None else self.heads.get(region)
        return architecture.find_parts(self.model.get_submodule(above), leaf, layers.find_base(module), heads)

    def _cut(self, region: str, name: str, features: int) -> Cut:
        heads = self.heads.get(region)
        if heads is None:
            return Columns()
        is_key = name.rpartition(".")[2] in KEY_VALUE
        count = heads.num_kv_heads if is_key else heads.num_heads
        if features % count:
            kind = "key/value" if is_key else "query"
            self.problems.append(f"{generic(name)} has {features} features, which are not {count} {kind} heads")
            return Columns()
        return heads.cut_keys(features) if is_key else heads.cut_queries(features)

    def _read_dropout(self, name: str) -> Finding | None:
        region, leaf = self._region(name), name.rpartition(".")[2]
        if region is None:
            is_in_layer = name.startswith(f"{self.layers}.")
            return Finding(TokenLocal(), "dropout") if is_in_layer else Finding(Whole(), "dropout")
        if leaf in architecture.ROW_DROPOUTS:
            return Finding(TokenLocal(), "dropout behind the region")
        heads = self.heads.get(region)
        return None if heads is None else Finding(HeadLocal(heads.cut_queries(heads.num_heads)), "dropout")

    def _read_whole(self, name: str, module: nn.Module, holds: list[str], rule: str | None) -> Finding | None:
        region = self._region(name)
        if region is not None:
            return self._read_in_region(region, name, module, holds, rule)
        leaf = name.removeprefix(f"{self.base}.")
        if leaf in architecture.POSITIONS:
            return Finding(Whole(), rule or "position embedding", "before the layers")
        if not self._is_in_layer(name) and leaf not in architecture.FINAL_NORMS:
            return self._refuse(name, module, holds, Whole(), "what it does to tokens is unknown")
        if is_norm(module):
            return Finding(TokenLocal(), rule or "norm", "own tokens")
        return self._refuse(name, module, holds, TokenLocal(), "no rule says how to cut it")

    def _read_in_region(
        self, region: str, name: str, module: nn.Module, holds: list[str], rule: str | None
    ) -> Finding | None:
        heads = self.heads.get(region)
        if architecture.is_activation(module):
            return Finding(InRegion(), rule or "activation", "own features")
        if not (is_norm(module) or rule is not None):
            return self._refuse(name, module, holds, InRegion(), "no rule says how to cut it")
        if heads is not None and is_norm(module):
            return self._read_head_norm(region, name, module, rule)
        return Finding(InRegion(), rule or "norm", "own features")

    def _read_head_norm(self, region: str, name: str, module: nn.Module, rule: str | None) -> Finding | None:
        """A norm of each head has a weight as wide as a head; one of all of them is cut with them, if it can be."""
        attention, heads = self.model.get_submodule(region), self.heads[region]
        shape = tuple(module.get_parameter("weight").shape)
        width = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
        if shape == (width,):
            return Finding(InRegion(), rule or "norm of heads", "own heads")
        is_key = "k_" in name.rpartition(".")[2]
        if type(module).__name__ in architecture.FEATURE_NORMS and len(shape) == 1:
            cut = heads.cut_keys(shape[0]) if is_key else heads.cut_queries(shape[0])
            return Finding(FeatureNorm(cut), rule or "norm of all heads")
        if type(module).__name__ in architecture.HEAD_NORMS and len(shape) == 2 and shape[1] == width:
            rows = heads.cut_keys(heads.num_kv_heads) if is_key else heads.cut_queries(heads.num_heads)
            return Finding(HeadRows(rows), rule or "norm with a row for each head")
        self.problems.append(
            f"{generic(name)} ({type(module).__name__} {list(shape)}) normalises across heads that are cut"
        )
        return None

    def _is_cut_all_the_same(self, region: str) -> bool:
        """Whether what stands between gathering columns and splitting rows works on a cut too: a norm, a split."""
        owner = self.model.get_submodule(region)
        is_packed = any(self._find_parts(f"{region}.{leaf}", child) for leaf, child in owner.named_children())
        return is_packed or type(getattr(owner, "q_norm", None)).__name__ in architecture.FEATURE_NORMS

    def _refuse(self, name: str, module: nn.Module, holds: list[str], role: Role, why: str) -> Finding | None:
        if self._is_allowed(generic(name)) or self._is_allowed(name):
            return Finding(role, "allowed", "allowed by the caller")
        self.problems.append(f"{generic(name)} ({type(module).__name__}: {', '.join(holds)}) is not covered: {why}")
        return None

    def _region(self, name: str) -> str | None:
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((place for place in above if generic(place) in self.regions), None)

    def _is_in_layer(self, name: str) -> bool:
        return name.startswith(f"{self.layers}.")

    def _is_allowed(self, path: str) -> bool:
        return any(is_match(pattern, path) or pattern == path for pattern in self.allowed)

    def _find(self, pattern: str) -> str | None:
        """The first module or parameter that a rule names."""
        every = [name for name, _ in self.model.named_modules()]
        every += [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        return next((name for name in every if generic(name) == pattern), None)

    def _describe(self, region: str) -> str:
        return f"{generic(region)} ({type(self.model.get_submodule(region)).__name__})"
