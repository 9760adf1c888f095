"""The page of architectures against what `plan_for` says of each causal language model of transformers with a plan.

Run as a program, it prints the page.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ConfigError
from plait.hf.plan import plan_for
from tests.support.architectures import ARCHITECTURES, SIZES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "architectures.md"

BEGIN = """\
# Architectures

Every causal language model of transformers {version} whose config has tensor-parallel rules for its layers, and GPT-2.
*compared*: logits, loss and every gradient of a small model are those of the unsharded one, in float64, at 2 and 3
ranks, with and without sequence parallelism. *planned*: of a class that is compared, under another name. Otherwise:
what `plait.plan_for` says first.

`tests/torch/hf/test_architectures.py` prints this page and compares it.

| architecture | class | |
|---|---|---|
"""


def list_architectures() -> list[str]:
    """By transformers' names."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def has_rules(name: str) -> bool:
        rules = getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) or {}
        return name == "gpt2" or any(".*." in pattern for pattern in rules)

    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING and has_rules(name))


def build_small(name: str) -> Any:
    """A small model on the meta device, or None where these sizes do not make one."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[name]
    fields = {field for each in kind.__mro__ for field in getattr(each, "__annotations__", {})} | set(
        kind.attribute_map
    )
    sizes = {**SIZES, "head_dim": 4, "moe_intermediate_size": 8, **ARCHITECTURES.get(name, {})}
    try:
        with torch.device("meta"):
            config = kind(**{field: value for field, value in sizes.items() if field in fields})
            return AutoModelForCausalLM.from_config(config)
    except Exception:  # of many kinds: each architecture has its own conditions on sizes
        return None


def describe(name: str) -> tuple[str, str]:
    """The class, and what can be said of it."""
    model = build_small(name)
    if model is None:
        return "", "no small model to try it with"
    kind = type(model).__name__
    try:
        plan_for(model)
    except ConfigError as error:
        first = error.message.split("\n  - ")[1 if "\n  - " in error.message else 0]
        return kind, first.removeprefix(f"plan of {kind}: ").replace("|", "\\|")
    return kind, "compared" if name in ARCHITECTURES else "planned"


def build_page() -> str:
    """All of it."""
    import transformers

    rows = [(name, *describe(name)) for name in list_architectures()]
    version = ".".join(transformers.__version__.split(".")[:2])
    return BEGIN.format(version=version) + "".join(f"| {name} | {kind} | {what} |\n" for name, kind, what in rows)


@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_happens():
    assert build_page() == PAGE.read_text()


if __name__ == "__main__":
    sys.stdout.write(build_page())
