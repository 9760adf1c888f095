"""What a Hugging Face directory holds beside weights and config, and goes along when it is written anew."""

import json
import shutil
from pathlib import Path
from typing import Any

from plait.checkpoint.folder import write_text
from plait.errors import CheckpointError

_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.model",
    "chat_template*", "generation_config.json", "LICENSE*",
)  # fmt: skip


def list_side_files(source: Path) -> list[Path]:
    """Tokenizer, chat template, how to generate, licence."""
    found = {path for pattern in _PATTERNS for path in source.glob(pattern) if path.is_file()}
    return sorted(found)


def copy_side_files(source: Path, target: Path, *, replace: bool = False) -> list[str]:
    """Copy them to `target`, and return their names; what is there already stays unless `replace`.

    Raises:
        CheckpointError: one cannot be read or written.
    """
    copied = []
    for path in list_side_files(source):
        to = target / path.name
        if to.exists() and not replace:
            continue
        try:
            shutil.copyfile(path, to)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be copied to {target} ({error.strerror})") from error
        copied.append(path.name)
    return copied


def write_json(path: Path, body: Any) -> None:
    """Write a JSON file as Hugging Face does.

    Raises:
        CheckpointError: it cannot be written.
    """
    write_text(path, json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
