"""The plan of a Hugging Face causal language model: transformers' own rules, read as roles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.contract.plan import Plan, Role
from plait.errors import ConfigError
from plait.hf import architecture
from plait.hf.finding import COLUMN_RULES, ROW_RULES, Finding, generic
from plait.hf.heads import HeadCount
from plait.hf.lora.layers import unwrap
from plait.hf.packed import Part
from plait.hf.reading import Reading
from plait.hf.table import build_table


@dataclass(frozen=True)
class ModelPlan:
    """What every module of a Hugging Face model becomes. Printed, it is a table.

    Attributes:
        findings: the role of each module and the rule or reason behind it, by module path pattern.
        regions: patterns of the modules whose input is gathered once: attention, MLP.
        base: path of the base model.
        layers: path of its list of layers.
        exit: path of the module behind which tokens are gathered; None where they stay cut up to the head.
        parts: of each packed linear, by its path.
        heads: of each attention, by its path.
    """

    findings: Mapping[str, Finding]
    regions: tuple[str, ...]
    base: str
    layers: str
    exit: str | None
    parts: Mapping[str, tuple[Part, ...]]
    heads: Mapping[str, HeadCount]

    def build_plan(self, *, sequence_parallel: bool) -> Plan:
        """The same as `plait.parallel` takes it."""
        return Plan(self.roles, sequence_parallel=sequence_parallel, regions=self.regions)

    @property
    def roles(self) -> dict[str, Role]:
        """By module path pattern. Parts of a packed linear are modules below it, as they are once it is parallel."""
        return {pattern: finding.role for pattern, finding in self.findings.items()}

    @property
    def replicated(self) -> dict[str, str]:
        """Patterns of the modules of which every rank holds all, and why."""
        return {pattern: finding.whole for pattern, finding in self.findings.items() if finding.whole is not None}

    def __str__(self) -> str:
        """A line for each pattern."""
        return build_table(self.findings, self.layers, self.regions)


def plan_for(model: Any, *, allow: Sequence[str] = ()) -> ModelPlan:
    """Read the plan of a Hugging Face causal language model: nothing is changed, no weight is looked at.

    `allow` names, by module path pattern, what may stay whole although it is large, and rules that may match nothing.

    Raises:
        ConfigError: lists a model without rules, rules that match nothing or have no parallel twin, and modules that no
            rule covers.
    """
    model = unwrap(model)
    _check_model(model)
    kind = type(model).__name__
    rules = architecture.find_rules(model)
    base, layers = model.base_model_prefix, _find_layers(rules)
    if layers is None:
        raise ConfigError(
            f"{kind} has no tensor-parallel plan, neither in transformers nor here, so how to cut it is unknown",
            hint="give a plan: plait.Plan({module path pattern: role, ...})",
        )
    reading = Reading(model, rules, tuple(allow), base, layers, _list_regions(model, rules, layers))
    reading.read()
    if reading.problems:
        problems = list(dict.fromkeys(reading.problems))
        hint = 'what may stay whole is named in allow=("model.layers.*.x", ...) of plait.plan_for'
        raise ConfigError.from_problems(f"plan of {kind}", problems, hint=hint)
    found = _join(reading.findings, [name for name, _ in model.named_modules()])
    return ModelPlan(
        findings=found,
        regions=reading.regions,
        base=base,
        layers=layers,
        exit=f"{base}.{last}" if (last := architecture.EXITS.get(model.config.model_type)) else None,
        parts=reading.parts,
        heads=reading.heads,
    )


def _check_model(model: object) -> None:
    kind = type(model).__name__
    wanted = ("config", "base_model_prefix", "get_input_embeddings", "get_output_embeddings")
    if not isinstance(model, nn.Module) or not all(hasattr(model, name) for name in wanted):
        raise ConfigError(
            f"{kind} is no model of transformers, so its plan is unknown",
            hint="give a plan: plait.Plan({module path pattern: role, ...})",
        )
    causal: Any = model
    if causal.get_output_embeddings() is None or not hasattr(model, "prepare_inputs_for_generation"):
        raise ConfigError(f"{kind} is no causal language model", hint="give the ...ForCausalLM of this architecture")


def _find_layers(rules: Mapping[str, str]) -> str | None:
    """`model.layers`, from the rules of what is in the layers; the first that cuts columns, else the first."""
    inside = [
        (rule in COLUMN_RULES, pattern.partition(".*.")[0]) for pattern, rule in rules.items() if ".*." in pattern
    ]
    return max(inside, key=lambda found: found[0])[1] if inside else None


def _list_regions(model: nn.Module, rules: Mapping[str, str], layers: str) -> tuple[str, ...]:
    """What holds a column and a row; the outermost of those that hold one another."""
    names = {generic(name) for name, _ in model.named_modules()}
    linear = [
        pattern
        for pattern, rule in rules.items()
        if rule in (*COLUMN_RULES, *ROW_RULES) and pattern.startswith(f"{layers}.*.") and pattern in names
    ]
    above = list(dict.fromkeys(pattern.rpartition(".")[0] for pattern in linear))
    return tuple(place for place in above if not any(place.startswith(f"{other}.") for other in above))


def _join(findings: Mapping[str, Finding], names: Sequence[str]) -> dict[str, Finding]:
    """One entry for modules that differ in their layer's number only, and are alike.

    With adapters in some layers only, linears have roles of their own in some and not in others.
    """
    alike: dict[str, set[Finding | None]] = {}
    for name in (*names, *findings):
        alike.setdefault(generic(name), set()).add(findings.get(name))
    return {(generic(name) if len(alike[generic(name)]) == 1 else name): finding for name, finding in findings.items()}
