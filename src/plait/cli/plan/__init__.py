"""`plait plan`: what a run will cost, before it, without torch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Group, RenderableType
from rich.text import Text

from plait.cli.arguments import json_option, overrides_argument, source_argument
from plait.cli.console import print_tables
from plait.cli.files import list_unwritable, write_file
from plait.cli.plan.record import build_record
from plait.cli.plan.table import build_tables
from plait.cli.plan.tree import build_explanation
from plait.config.file.format import format_run_config
from plait.config.load import load_run_config
from plait.config.recipe import NAMES
from plait.config.run import RunConfig
from plait.errors import ConfigError, PlaitError
from plait.planner.cluster import Cluster
from plait.planner.hardware import Hardware, load_hardware
from plait.planner.plan import LIMIT, PlanReport, plan
from plait.planner.run_config import build_run_config, choose_runnable
from plait.planner.space.fixed import Fixed, parse_fixed
from plait.planner.timeline import build_layer_charts
from plait.planner.why_not import WhyNot, why_not
from plait.schedule.trace_file import build_trace
from plait.units import format_bytes

_FILES = {"--write": "write_path", "--trace": "trace_path", "--report": "report_path"}

_OF_A_SERVER = ("batch", "prompt", "generate")

_OF_A_RUN = ("seq", "global_batch", "top", "explain", "why", *_FILES.values())

_SECTIONS = ("precision", "overlap")
"""Of a run, what a plan takes as it is."""

_AT_MOST = click.IntRange(max=10**9)

_BATCH_HELP = "Sequences of a step [required unless the config has train or parallel]"

_Loaded = TypeVar("_Loaded")


@click.command("plan")
@source_argument
@overrides_argument
@click.option("--hardware", required=True, help="A name (h100), a TOML file, or: measured")
@click.option("--gpus", type=click.IntRange(1), required=True, help="Devices of the job")
@click.option("--seq", type=click.IntRange(1), help="Tokens of a sequence [default: that of the run]")
@click.option("--global-batch", type=click.IntRange(1), help=_BATCH_HELP)
@click.option("--fix", multiple=True, metavar="KEY=VALUE,...", help="Part of the plan as given: tp=8,pp=4")
@click.option("--quantization", type=click.Choice(NAMES), help="Precision recipe [default: that of the run]")
@click.option("--top", type=click.IntRange(1), default=LIMIT, show_default=True, help="Plans of the table")
@click.option("--explain", is_flag=True, help="Show what the best plan's step is made of, and from which constants")
@click.option("--why-not", "why", multiple=True, metavar="KEY=VALUE,...", help="Say why the best plan has not: tp=16")
@click.option("--write", "write_path", type=Path, help="Write the best plan that plait train runs (.toml)")
@click.option("--trace", "trace_path", type=Path, help="Write the best plan's layer as a trace for Perfetto (.json)")
@click.option("--report", "report_path", type=Path, help="Write everything as one page (.html)")
@click.option("--inference", is_flag=True, help="Plan a server, not a training run")
@click.option("--batch", type=_AT_MOST, default=1, show_default=True, help="Of a server: requests answered together")
@click.option("--prompt", type=_AT_MOST, default=1024, show_default=True, help="Of a server: tokens of a prompt")
@click.option("--generate", type=_AT_MOST, default=256, show_default=True, help="Of a server: tokens of an answer")
@json_option
def command(source: str, overrides: Sequence[str], as_json: bool, **options: Any) -> None:
    """Rank every way to train MODEL on so many devices, by predicted time.

    MODEL is a TOML file, a preset (see plait models) or a Hugging Face config. Searched are tp, sequence parallelism,
    cp, pp, its chunks and schedule, dp and what it shards, micro-batch, recompute; --fix leaves less. Overrides set
    what --write writes beside the plan: data.kind=tokens data.paths=corpus.bin.
    """
    run, hardware, fixed = _load(source, overrides, options)
    cluster = Cluster(hardware, options["gpus"])
    if options["inference"]:
        _plan_server(source, run, cluster, fixed, options, as_json=as_json)
        return
    report = plan(
        run.model, cluster, seq_len=options["seq"] or run.seq_len, global_batch=_count_sequences(run, options),
        fixed=fixed, name=source, limit=options["top"],
    )  # fmt: skip
    answers = [why_not(report, asked) for asked in options["why"]]
    if as_json:
        click.echo(json.dumps(build_record(report, answers), indent=2))
    else:
        print_tables(lambda width: _show(report, answers, width, explain=options["explain"]))
    _write_files(report, run, options)
    if not report.ranked:
        what = "nothing with what is fixed" if options["fix"] else "no plan"
        raise ConfigError(
            f"{what} fits these devices: the leanest plan lacks {format_bytes(-report.best.memory.margin_bytes)}",
            hint="fix less, or take more devices" if options["fix"] else "take more devices",
        )


def _load(source: str, overrides: Sequence[str], options: dict[str, Any]) -> tuple[RunConfig, Hardware, Fixed]:
    """Everything that can be wrong before anything is planned, in one error."""
    problems: list[PlaitError] = []
    run = _try(lambda: load_run_config(source, overrides), problems)
    hardware = _try(lambda: load_hardware(options["hardware"]), problems)
    recipe = [] if options["quantization"] is None else [f"quantization={options['quantization']}"]
    fixed = _try(lambda: parse_fixed([*options["fix"], *recipe], what="--fix"), problems)
    for asked in options["why"]:
        if _try(lambda asked=asked: parse_fixed([asked], what="--why-not"), problems) == {}:  # type: ignore[misc]
            problems.append(ConfigError(f'--why-not "{asked}": asks for nothing', hint="--why-not tp=16"))
    problems += map(ConfigError, _list_needless(options))
    if run is not None and not options["inference"]:
        _try(lambda: _count_sequences(run, options), problems)
    _check_files(options, problems)
    if run is None or hardware is None or fixed is None or problems:
        if len(problems) == 1:
            raise problems[0]
        raise ConfigError.from_problems("plait plan", [_describe(problem) for problem in problems])
    given: dict[str, Any] = {name: getattr(run, name) for name in _SECTIONS if name in run.model_fields_set}
    if "quantization" in run.model_fields_set:
        given["quantization"] = run.quantization.recipe
    return run, hardware, {**given, **fixed}


def _try(load: Callable[[], _Loaded], problems: list[PlaitError]) -> _Loaded | None:
    try:
        return load()
    except PlaitError as error:
        problems.append(error)
        return None


def _describe(error: PlaitError) -> str:
    text = error.message if error.hint is None else f"{error.message} ({error.hint})"
    return text.replace("\n", "\n  ")


def _list_needless(options: dict[str, Any]) -> list[str]:
    """What was given of a server where a training run is planned, or the other way, and would change nothing."""
    context = click.get_current_context()
    names, why = (
        (_OF_A_RUN, "is of a training run, and not of a server (--inference)")
        if options["inference"]
        else (_OF_A_SERVER, "is of a server (--inference)")
    )
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return [f"{_show_option(flags[name], options[name])}: {why}" for name in given]


def _show_option(flag: str, value: Any) -> str:
    """`--seq 4096`, `--explain`."""
    words = value if isinstance(value, tuple) else () if value is True else (value,)
    return " ".join([flag, *map(str, words)])


def _check_files(options: dict[str, Any], problems: list[PlaitError]) -> None:
    """What could not be written afterwards is not searched for."""
    asked = {option: options[name] for option, name in _FILES.items() if options[name] is not None}
    found = list_unwritable(asked)
    if "--write" in asked and asked["--write"].suffix != ".toml":
        found.append(f"--write {asked['--write']}: a plan is a .toml file")
    problems += map(ConfigError, found)
    if "--report" in asked and not problems:
        from plait.planner.report.write import check_can_write  # noqa: PLC0415 (plotly is an extra)

        _try(lambda: check_can_write(asked["--report"]), problems)


def _count_sequences(run: RunConfig, options: dict[str, Any]) -> int:
    if options["global_batch"] is not None:
        return int(options["global_batch"])
    if not {"train", "parallel"} & run.model_fields_set:
        raise ConfigError("--global-batch is required: the model says nothing of a batch", hint="--global-batch 512")
    return run.tokens_per_step // run.seq_len


def _show(report: PlanReport, answers: Sequence[WhyNot], width: int, *, explain: bool) -> RenderableType:
    parts: list[RenderableType] = [build_tables(report, width)]
    if explain:
        parts += [Text(), build_explanation(report.best)]
    for answer in answers:
        parts += [Text(), Text(answer.reason)]
    return Group(*parts)


def _write_files(report: PlanReport, run: RunConfig, options: dict[str, Any]) -> None:
    """Nothing is written before it is known that there is a plan to write."""
    chosen, note = report.best, ""
    if options["write_path"] is not None:
        chosen, note = choose_runnable(report, compiled=run.train.compile)
    if (path := options["trace_path"]) is not None:
        charts = [layer.chart for layer in build_layer_charts(report.best)]
        write_file(path, json.dumps(build_trace(charts)) + "\n")
    if (path := options["report_path"]) is not None:
        from plait.planner.report.write import write_report  # noqa: PLC0415 (plotly is an extra)

        write_report(report, path)
    if (path := options["write_path"]) is not None:
        write_file(path, format_run_config(build_run_config(chosen, run)))
        if note:
            click.echo(f"{path}: {note}", err=True)
        if run.data is None:
            click.echo(f"{path}: has no data yet: plait train {path} data.kind=tokens data.paths=...", err=True)


def _plan_server(
    source: str, run: RunConfig, cluster: Cluster, fixed: Fixed, options: dict[str, Any], *, as_json: bool
) -> None:
    from plait.planner.inference import plan_inference  # noqa: PLC0415 (who trains need not wait for it)
    from plait.planner.inference.record import build_inference_record  # noqa: PLC0415
    from plait.planner.inference.table import build_inference_tables  # noqa: PLC0415

    report = plan_inference(
        run.model, cluster, batch=options["batch"], prompt_len=options["prompt"], generate_len=options["generate"],
        fixed=fixed,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(build_inference_record(source, report), indent=2))
    else:
        print_tables(lambda _: build_inference_tables(source, report))
