"""Input files, and the documents in them."""

import json
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from plait.config.data import DataConfig
from plait.errors import ConfigError

_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "tokens": (".npy", ".bin")}
"""What is taken from a folder; of text, every file that is not hidden."""


def list_files(config: DataConfig) -> list[Path]:
    """The files of `config.paths`, in the order given, those of a folder or pattern by name, empty ones left out.

    Raises:
        ConfigError: all paths that lead to nothing.
    """
    problems: list[str] = []
    files: list[Path] = []
    for path in config.paths:
        found = [file for file in _expand(path, config.kind) if file.stat().st_size]
        if not found:
            problems.append(f"{path}: {_say_why_nothing(path, config.kind)}")
        files += found
    if problems:
        raise ConfigError.from_problems("data.paths", problems, hint="paths start at the working directory")
    return list(dict.fromkeys(files))


def _expand(path: str, kind: str) -> list[Path]:
    if Path(path).is_dir():
        found = sorted(Path(path).rglob("*"))
        return [file for file in found if file.is_file() and _is_wanted(file.relative_to(path), kind)]
    if has_magic(path) and not Path(path).exists():
        matches = sorted(glob(path, recursive=True))  # noqa: PTH207 - a pattern may be absolute
        return [Path(match) for match in matches if Path(match).is_file()]
    return [Path(path)] if Path(path).is_file() else []


def _is_wanted(relative: Path, kind: str) -> bool:
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return not is_hidden and (kind not in _SUFFIXES or relative.suffix in _SUFFIXES[kind])


def _say_why_nothing(path: str, kind: str) -> str:
    if Path(path).is_dir():
        suffixes = " or ".join(_SUFFIXES.get(kind, ()))
        return f"no {suffixes} file with anything in it in this folder".replace("  ", " ")
    if Path(path).is_file():
        return "the file is empty"
    return "no file matches this pattern" if has_magic(path) else "no such file or folder"


def read_documents(config: DataConfig, file: Path) -> Iterator[str]:
    """The documents of one file: all of a text file, each line of a JSONL file.

    Raises:
        ConfigError: the file is not UTF-8, or a line has no text.
    """
    try:
        if config.kind == "text":
            yield file.read_text(encoding="utf-8")
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, config.text_key, f"{file}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})",
            hint="name the text files in data.paths by a pattern, such as 'corpus/**/*.txt'",
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error


def _text_of(line: str, key: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    text = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: has no text under {key!r}, only {_describe_entry(entry, key)}",
            hint="set data.text_key to the key of the text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the text has half a character ({error})") from error
    return text


def _describe_entry(entry: object, key: str) -> str:
    """What a JSON line has instead of text."""
    if not isinstance(entry, dict):
        return f"a {type(entry).__name__}"
    if key in entry:
        return f"a value of type {type(entry[key]).__name__}"
    return ", ".join(map(repr, entry)) or "an empty object"
