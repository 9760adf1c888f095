from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config import GptConfig, RunConfig, load_preset, load_run_config
from plait.config.load import _SECTIONS
from plait.config.model import FAMILIES
from plait.errors import ConfigError

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))

RUN = """
name = "mine"
[model]
preset = "llama-tiny"
max_seq_len = 32
[parallel]
tp = 2
[train]
learning_rate = 1
"""

TOO_MANY_RANKS = (
    "parallel.tp = 16 (command line): layers.*.attention.wq [N*H, D]: 8 query heads in 4 KV groups of 2 "
    "cannot be cut over 16 ranks: 4 ranks would share the 2 query heads of one KV head"
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def read_error(source: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(str(source), overrides)
    return str(caught.value)


def test_overrides_lie_over_the_file_and_the_file_over_the_preset(run_file: Path) -> None:
    config = load_run_config(str(run_file), ["parallel.dp_replicate=2", "train.steps=7", "model.num_layers=1"])
    assert (config.name, config.parallel.tp, config.parallel.dp, config.train.steps) == ("mine", 2, 2, 7)
    assert config.model == load_preset("llama-tiny").model_copy(update={"max_seq_len": 32, "num_layers": 1})


def test_derived_widths_follow_what_they_are_derived_from() -> None:
    assert load_run_config("llama-tiny", ["model.width=128"]).model.head_width == 16
    assert load_run_config("gpt-tiny", ["model.width=128"]).model.mlp_width == 512


def test_override_of_the_preset_replaces_the_whole_model(run_file: Path) -> None:
    config = load_run_config(str(run_file), ["model.preset=gpt-tiny", "model.num_layers=1"])
    assert isinstance(config.model, GptConfig)
    assert (config.model.max_seq_len, config.model.num_layers) == (64, 1)


def test_model_may_be_written_out(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    fields = load_preset("llama-tiny").model_dump(exclude_none=True)
    lines = (
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in fields.items()
    )
    file.write_text("[model]\n" + "\n".join(lines))
    assert load_run_config(str(file)).model == load_preset("llama-tiny")


def test_a_single_problem_keeps_its_hint_apart(run_file: Path) -> None:
    assert read_error(run_file, "parallel.tp=16") == (
        f"{run_file}: {TOO_MANY_RANKS}\n\nhint: use a degree of at most 8"
    )


def test_every_problem_is_reported_at_once(run_file: Path) -> None:
    overrides = ["foo", "parallel.pt=9", "trian.steps=3", "train.seq_len=99", "train.warmup_steps=2000", "name=5"]
    assert read_error(run_file, *overrides).splitlines() == [
        f"{run_file}: 6 problems",
        "  - foo: an override must be of the form key=value (overrides look like train.steps=100)",
        '  - parallel.pt = 9 (command line): unknown key (did you mean "tp"?)',
        '  - trian (command line): unknown key (did you mean "train"?)',
        "  - name = 5 (command line): should be a valid string",
        "  - train.warmup_steps = 2000 (command line): is more than train.steps = 1000",
        "  - train.seq_len = 99 (command line): is more than model.max_seq_len = 32",
    ]


def test_a_section_with_a_problem_does_not_hide_conflicts_of_the_others(run_file: Path) -> None:
    message = read_error(run_file, "parallel.tp=16", "train.steps=ten", "precision.compute=fp8")
    assert message.splitlines()[1:] == [
        "  - precision.compute = \"fp8\" (command line): should be 'float32' or 'bfloat16'",
        '  - train.steps = "ten" (command line): should be a valid integer',
        f"  - {TOO_MANY_RANKS} (use a degree of at most 8)",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=0"], "train.steps = 0 (command line): should be greater than or equal to 1"),
        (["train.steps=true"], "train.steps = true (command line): should be a valid integer"),
        (["train.steps.x=1"], "train.steps (command line): should be a valid integer"),
        (["train.learning_rate=nan"], "train.learning_rate = NaN (command line): should be a finite number"),
        (["train.label_smoothing=1"], "train.label_smoothing = 1 (command line): should be less than 1"),
        (["parallel.sequence_parallel=1"], "parallel.sequence_parallel = 1 (command line): should be a valid boolean"),
        (["train=3"], "train = 3 (command line): should be a table"),
        (["model=3"], "model = 3 (command line): should be a table"),
        (["model.preset=3"], "model.preset = 3 (command line): should be a string"),
        (["model.family=gpt"], 'model.family = "gpt" (command line): the preset is of family "llama"'),
        (["model.num_heads=6"], "model.num_heads = 6 (command line): is not a multiple of num_kv_heads = 4"),
        (["model.width=60"], "model.width = 60 (command line): is not a multiple of num_heads = 8"),
        (["data.kind=tokens", "data.paths=[1]"], "data.paths.0 = 1 (command line): should be a valid string"),
        (["data.kind=tokens"], "data.paths: is required"),
        (["parallel.tp=1025"], "parallel.tp = 1025 (command line): should be less than or equal to 1024"),
        (["model.num_layers=10001"], "model.num_layers = 10001 (command line): should be less than or equal to 10000"),
        (["train.steps=1_000_000_001"], "(command line): should be less than or equal to 1000000000"),
        (["train.steps=" + "9" * 5000], "(command line): should be a valid integer"),
        (["train.steps=" + "[" * 5000], "(command line): should be a valid integer"),
    ],
    ids=lambda value: value[-1][:40] if isinstance(value, list) else "",
)
def test_override_that_cannot_be_is_one_clear_error(run_file: Path, overrides: list[str], message: str) -> None:
    assert message in read_error(run_file, *overrides)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.preset=gtp2", 'did you mean "gpt2"?'),
        ("model.num_layer=3", 'did you mean "num_layers"?'),
        ("model.rope_scaling.factr=3", 'did you mean "factor"?'),
        ("train.step=3", 'did you mean "steps"?'),
        ("sede=3", 'did you mean "seed"?'),
        ("parallel.zzz=3", "known are cp, dp_replicate, dp_shard, pp, reshard_after_forward, sequence_parallel, tp"),
        ("tp=3", 'did you mean "parallel.tp"?'),
        ("train.reduce=float32", 'did you mean "precision.reduce"?'),
        ("train.seed=3", 'did you mean "seed"?'),
    ],
)
def test_unknown_key_names_the_nearest(run_file: Path, override: str, hint: str) -> None:
    assert hint in read_error(run_file, override)


def test_the_degree_that_became_two_says_what_to_write(run_file: Path) -> None:
    message = read_error(run_file, "parallel.dp=2")
    assert "parallel.dp = 2 (command line): is now two degrees: dp_replicate (" in message
    assert message.endswith("hint: parallel.dp_replicate does what parallel.dp did")
    run_file.write_text("[model]\npreset = 'llama-tiny'\n[parallel]\ndp = 4")
    assert "parallel.dp = 4: is now two degrees" in read_error(run_file)


def test_model_without_preset_or_family_says_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nwidth = 64\n[train]\nsteps = 0")
    message = read_error(file)
    assert "model.preset: is required, unless model.family and its keys are given (presets are llama2-7b" in message
    assert "train.steps = 0: should be greater than or equal to 1" in message
    file.write_text("[model]\nfamily = 'lama'")
    assert 'model.family = "lama": unknown family\n\nhint: did you mean "llama"?' in read_error(file)


def test_file_without_a_model_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 1")
    assert f"{file}: model.preset: is required" in read_error(file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("lama-tiny", '"lama-tiny" is neither a file nor a preset\n\nhint: did you mean "llama-tiny"?'),
        ("configs/tny.toml", 'configs/tny.toml: there is no such file\n\nhint: did you mean "configs/tiny.toml"?'),
        ("nowhere/run.toml", "nowhere/run.toml: there is no such file"),
        ("src", "src: the folder has no config.json"),
        ("/dev/null", "/dev/null: is neither a file nor a folder"),
    ],
)
def test_source_that_does_not_exist_names_the_nearest(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert read_error(source).startswith(message)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_config_of_the_repository_loads(file: Path) -> None:
    assert load_run_config(str(file)).name == file.stem


SECTIONS = {"model": FAMILIES["llama"], **_SECTIONS}
KEYS = [
    *RunConfig.model_fields,
    *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields),
    "model.preset",
    "model.rope_scaling.factor",
    "train.nonsense",
]
VALUES = [
    "0",
    "1",
    "-1",
    "3",
    "9",
    "1e400",
    "nan",
    "true",
    "''",
    "text",
    "gpt",
    "[]",
    "[1]",
    "['a']",
    "{a = 1}",
    "1979-05-27",
    "e2m1",
    "delayed",
    "mxfp8",
    "nvfp4",
]


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=4))
def test_no_override_leads_to_anything_but_a_run_or_a_config_error(overrides: list[tuple[str, str]]) -> None:
    with suppress(ConfigError):
        config = load_run_config("llama-tiny", [f"{key}={value}" for key, value in overrides])
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
