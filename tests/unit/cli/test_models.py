import json
import subprocess
import sys

from click.testing import CliRunner

from plait.cli.models import command
from plait.config import list_presets


def test_every_preset_is_a_line_with_its_name_first() -> None:
    result = CliRunner().invoke(command)
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(list_presets())


def test_a_line_states_parameters_layers_and_widths() -> None:
    line = next(line for line in CliRunner().invoke(command).stdout.splitlines() if line.startswith("llama3-8b "))
    assert " ".join(line.split()) == (
        "llama3-8b 8.03 G parameters 32 layers width 4096 mlp 14336 heads 32/8 vocab 128256 seq 8192 "
        "Llama 3, arXiv:2407.21783"
    )


def test_json_gives_every_number_exactly() -> None:
    listed = json.loads(CliRunner().invoke(command, ["--json"]).stdout)
    assert [model["name"] for model in listed] == list(list_presets())
    llama = next(model for model in listed if model["name"] == "llama2-7b")
    assert llama["num_parameters"] == 6_738_415_616
    assert (llama["family"], llama["head_width"], llama["rope_scaling"]) == ("llama", 128, None)


def test_listing_models_imports_neither_torch_nor_numpy_nor_rich() -> None:
    code = """
import sys
from plait.cli.main import main
try:
    main(["models"])
finally:
    heavy = {"torch", "numpy", "rich", "safetensors", "tokenizers"} & set(sys.modules)
    assert not heavy, heavy
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
