"""The tokenizer of a model that was trained here, in the form in which transformers finds it."""

from pathlib import Path
from typing import Any

from plait.config.data import END_OF_TEXT
from plait.hf.convert.origin import Origin
from plait.hf.directory.side_files import write_json


def copy_tokenizer(origin: Origin, folder: Path) -> tuple[int | None, list[str]]:
    """Copy the tokenizer of the run to `folder`; the id of what ends a text, where it is known, and notes."""
    if (folder / "tokenizer.json").is_file():
        return _find_end(folder / "tokenizer.json", None)[0], []
    data: Any = (origin.state.get("config") or {}).get("data") or {}
    path = data.get("tokenizer")
    if path is None:
        return None, ["the run had no tokenizer, so none is in the directory"]
    if not Path(path).is_file():
        return None, [f"the tokenizer of the run, {path}, is not there any more, so none is in the directory"]
    (folder / "tokenizer.json").write_bytes(Path(path).read_bytes())
    end, name = _find_end(folder / "tokenizer.json", data.get("end_of_text"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if origin.native is not None:
        config["model_max_length"] = origin.native.max_seq_len
    write_json(folder / "tokenizer_config.json", config if name is None else {**config, "eos_token": name})
    return end, []


def _find_end(path: Path, name: str | None) -> tuple[int | None, str | None]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed where there is no tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    for each in (name,) if name is not None else END_OF_TEXT:
        found = tokenizer.token_to_id(each)
        if found is not None:
            return found, each
    return None, None
