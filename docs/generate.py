"""Write docs/reference from code and benchmarks, and the README's results; with `--check`, only say what is stale."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from measured import build_benchmarks_page, build_readme_result
from pydantic_core import PydanticUndefined

from plait import errors
from plait.cli.main import group
from plait.config.axis.context import ContextConfig
from plait.config.axis.pipeline import PipelineConfig
from plait.config.data import DataConfig
from plait.config.hf.checkpoint import CheckpointModel
from plait.config.hf.lora import LoraConfig
from plait.config.model import GptConfig, Llama3RopeScaling, LlamaConfig
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.quantization import OperandConfig, QuantizationConfig
from plait.config.run import RunConfig
from plait.config.section import Section
from plait.config.train import TrainConfig
from plait.contract.report.table import DERIVATIONS, ShapeTable, build_shape_table
from plait.errors import PlaitError

ROOT = Path(__file__).parents[1]
README, REFERENCE = ROOT / "README.md", ROOT / "docs" / "reference"
CONSOLE = re.compile(r"```console\n\$ (plait .+)\n(?:.*\n)*?```\n")
BEGIN, END = "<!-- measured: written by docs/generate.py -->\n", "<!-- end of measured -->\n"
NOTE = "<!-- written by docs/generate.py; `make docs` -->\n"
SECTIONS: dict[str, type[Section]] = {
    "": RunConfig,
    "model (family = llama)": LlamaConfig,
    "model (family = gpt)": GptConfig,
    "model.rope_scaling": Llama3RopeScaling,
    "model (path = a Hugging Face directory)": CheckpointModel,
    "model.lora": LoraConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "context": ContextConfig,
    "overlap": OverlapConfig,
    "precision": PrecisionConfig,
    "quantization": QuantizationConfig,
    "quantization.input, .weight, .gradient": OperandConfig,
    "data": DataConfig,
    "train": TrainConfig,
}


def build_errors_page() -> str:
    """The tree of exceptions, and what each means."""
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")
    drawing = "\n".join(line[4:] for line in tree[1].splitlines())
    parts = [f"# Errors\n\n{tree[0]}\n\n```text\n{drawing}\n```\n\n{tree[2]}\n"]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, PlaitError):
            parents = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            parts.append(f"## `{kind.__name__}`\n\n{inspect.getdoc(kind)} Derived from {parents}.\n")
    parts.append(
        "## From the command line\n\nThe message goes to stderr after `error:`, the hint after a blank line. "
        "Exit status: 0 all went well, 1 a verification failed, 2 something given cannot work, 3 a rank died, hung or "
        "crashed (starting again may help), 130 interrupted.\n"
    )
    return "\n".join(parts)


def build_cli_page() -> str:
    """The help of every command."""
    parts = [
        "# Command line\n\n`plait` and `python -m plait` are the same. Data goes to stdout, everything else to stderr; "
        "`NO_COLOR` is respected.\n",
    ]
    parts += _list_help(group, click.Context(group, info_name="plait", **group.context_settings))
    return "\n".join(parts)


def _list_help(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command and of those below it."""
    context.terminal_width = context.max_content_width = 100
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            yield from _list_help(below, click.Context(below, info_name=name, parent=context))


def build_contracts_page() -> str:
    """The shape table of every operation that the runtime has a twin of."""
    parts = [
        "# Contracts\n\nWhat each operation promises: the layout of what goes in and out, and the collectives it "
        "issues. The docstrings of the runtime twins carry the same tables, and a test compares them. `plait explain` "
        "prints the contracts of a model with their numbers; the letters are in [notation](../concepts/notation.md).\n"
    ]
    for name in DERIVATIONS:
        table = build_shape_table(name)
        parts.append(f"## `contract.{name}`\n\n```text\n{table}\n```\n\n{_describe_all_reduce_mode(table)}\n")
    return "\n".join(parts)


def _describe_all_reduce_mode(table: ShapeTable) -> str:
    kinds = (table.forward_in_all_reduce_mode, table.backward_in_all_reduce_mode)
    if kinds == (table.forward, table.backward):
        return "The same in all-reduce mode."
    forward, backward = (", ".join(sorted(kind)) or "nothing" for kind in kinds)
    return f"In all-reduce mode tokens are whole on every rank; forward {forward}, backward {backward}."


def build_config_page() -> str:
    """Every key of a run config."""
    parts = [
        "# Config keys\n\nA run config is a TOML file, and any key can be overridden on the command line as "
        "`train.steps=100`. In `[model]`, `preset` names one of `plait models` or a Hugging Face `config.json`, and "
        "further keys override it. Unknown keys are refused; all problems of a file are reported at once.\n"
    ]
    for title, section in SECTIONS.items():
        heading = f"[{title}]" if title else "Top level"
        parts.append(f"## {heading}\n\n{inspect.getdoc(section)}\n\n{_build_key_table(section)}")
    return "\n".join(parts)


def _build_key_table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    meanings = _list_attribute_docstrings(section)
    for name, field in section.model_fields.items():
        if (isinstance(field.annotation, type) and issubclass(field.annotation, Section)) or name in ("model", "data"):
            kind, default = "table", "see below"
        else:
            kind, default = _describe_type(field.annotation, field.metadata), _describe_default(field)
        rows.append(f"| `{name}` | {kind} | {default} | {meanings.get(name, '')} |")
    return "\n".join(rows) + "\n"


def _describe_default(field: Any) -> str:
    if field.default_factory is not None:
        return "derived"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    return f"`{json.dumps(field.default)}`"


def _describe_type(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_args(annotation) and get_origin(annotation) is not tuple:
        described = [_describe_type(part, []) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(part for part in described if part)
    if get_origin(annotation) is tuple:
        return "list of strings"
    names = {int: "integer", float: "number", bool: "boolean", str: "string"}
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(limit, name)
    ]
    kind = names.get(annotation, "table" if isinstance(annotation, type) and issubclass(annotation, Section) else "")
    return " ".join([kind, *bounds])


def _list_attribute_docstrings(section: type[Section]) -> dict[str, str]:
    """The string literal below each field, which Python does not keep."""
    body = ast.parse(inspect.getsource(section)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def build_readme() -> str:
    """The README with what its command prints and its measured result put in again."""
    text = CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{_run(block[1])}```\n", README.read_text())
    before, begin, rest = text.partition(BEGIN)
    assert begin, README
    assert END in rest, README
    return before + BEGIN + build_readme_result() + END + rest.partition(END)[2]


def _run(command: str) -> str:
    """What a command prints, in plain text."""
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    run = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
    )
    return "".join(f"{line.rstrip()}\n" for line in run.stdout.splitlines())


def _build_page(build: Callable[[], str]) -> Callable[[], str]:
    return lambda: NOTE + build()


PAGES: dict[Path, Callable[[], str]] = {
    README: build_readme,
    REFERENCE / "benchmarks.md": _build_page(build_benchmarks_page),
    REFERENCE / "cli.md": _build_page(build_cli_page),
    REFERENCE / "config.md": _build_page(build_config_page),
    REFERENCE / "contracts.md": _build_page(build_contracts_page),
    REFERENCE / "errors.md": _build_page(build_errors_page),
}


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    stale = {page: text for page, build in PAGES.items() if (text := build()) != (page.exists() and page.read_text())}
    if "--check" not in arguments:
        for page, text in stale.items():
            page.write_text(text)
    if stale:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        print("stale:" if "--check" in arguments else "written:", names)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
