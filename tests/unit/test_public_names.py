import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import plait

SOURCE = ast.parse(Path(plait.__file__).read_text())


def list_typed_imports() -> dict[str, str]:
    """What a type checker sees: name to module."""
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_type_checkers_and_python_see_the_same_names() -> None:
    assert list_typed_imports() == plait._MODULES
    assert set(plait.__all__) == {"__version__", *plait._MODULES}
    assert dir(plait) == sorted(plait.__all__)


@pytest.mark.parametrize(("name", "module"), plait._MODULES.items())
def test_public_name_is_defined_where_it_is_looked_up(name: str, module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    defined = {node.name for node in ast.parse(Path(spec.origin).read_text()).body if hasattr(node, "name")}
    assert name in defined


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plait' has no attribute 'parallelise'"):
        _ = plait.parallelise


def test_looking_up_a_symbolic_name_imports_no_torch() -> None:
    code = "import plait, sys; plait.Plan; plait.MeshShape; plait.ConfigError; assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
