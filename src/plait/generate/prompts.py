"""Prompts from the command line and from files, as requests; every problem in them is found before anything starts."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, PlaitError
from plait.generate.request import Request, SamplingConfig
from plait.generate.source import Source

_SHOWN = 10
"""Problems that a message lists."""


def build_requests(
    source: Source, prompts: Sequence[tuple[str, str, SamplingConfig]], *, is_chat: bool
) -> list[Request]:
    """Tokenize prompts, each given by where it stands (`prompts.jsonl:3`), its text and its settings.

    Raises:
        ConfigError: lists all that do not fit into the context, and those without any token.
    """
    requests, problems = [], []
    for number, (where, text, sampling) in enumerate(prompts):
        try:
            tokens = source.encode_chat([{"role": "user", "content": text}]) if is_chat else source.encode(text)
            request = Request(str(number), tokens, sampling)
            source.capacity.check(request)
            requests.append(request)
        except ConfigError as error:
            problems.append(f"{where}: {error.message.removeprefix(f'request {number}: ')}")
    _raise_all("prompts", problems)
    return requests


def read_prompts(path: Path, defaults: SamplingConfig) -> list[tuple[str, str, SamplingConfig]]:
    """Read lines of `{"prompt": "..."}`, where a line may have settings of its own: `{"prompt": "...", "top_k": 5}`.

    Raises:
        ConfigError: a file that cannot be read; or all lines that cannot be used, by number.
    """
    try:
        # Not splitlines: a text in JSON may have separators of Unicode as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--prompts {path}: cannot be read: {said}") from error
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            prompts.append((where, *_parse(line, defaults)))
        except PlaitError as error:
            problems.append(f"{where}: {error.message}")
    _raise_all("prompts", problems)
    if not prompts:
        raise ConfigError(f"--prompts {path}: has no prompts", hint='write lines of {"prompt": "..."}')
    return prompts


def _parse(line: str, defaults: SamplingConfig) -> tuple[str, SamplingConfig]:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ConfigError(f"is not JSON that can be read: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError('is not an object with a text "prompt"')
    settings = {name: value for name, value in record.items() if name != "prompt"}
    return record["prompt"], SamplingConfig.from_mapping({**asdict(defaults), **settings})


def _raise_all(what: str, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError.from_problems(what, [*problems[:_SHOWN], *more])
