"""What a Hugging Face directory says about generation: tokenizer, end of sequence, context; no weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.generate.request import Capacity
from plait.hf.library import import_library, load_config, load_generation_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


@dataclass(frozen=True)
class Source:
    """A directory whose model generates text."""

    folder: Path
    tokenizer: Any
    eos_ids: frozenset[int]
    """Each of them ends a sequence."""
    capacity: Capacity
    dtype: str = "float32"
    """That of the weights, unless another is asked for."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, with those that the tokenizer puts around every text.

        Raises:
            ConfigError: it is no Unicode text: half of a surrogate pair, or bytes that are not UTF-8.
        """
        check_unicode(text)
        return tuple(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """The tokens of a conversation, up to where the model's next message begins.

        Raises:
            ConfigError: the tokenizer has no chat template, or it does not take these messages.
        """
        for message in messages:
            check_unicode(str(message.get("content", "")))
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self.folder}: the tokenizer has no chat template", hint="give plain prompts")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is a program of the model's authors
            raise ConfigError(f"{self.folder}: the chat template does not take these messages: {error}") from error
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def check_unicode(text: str) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        ConfigError: it is no Unicode text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is not Unicode: character {error.start} is half of a pair, or a byte that is not UTF-8"
        ) from error


def open_source(path: str | Path) -> Source:
    """Read what there is besides the weights; nothing is ever fetched.

    Raises:
        ConfigError: no such directory, no config or no tokenizer in it, or one that cannot be used.
    """
    folder = Path(path)
    config = load_config(folder)
    text_config = config.get_text_config()
    tokenizer = load_tokenizer(folder)
    capacity = Capacity(text_config.vocab_size, _derive_context(text_config, folder))
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return Source(folder, tokenizer, _find_eos_ids(text_config, tokenizer, folder), capacity, dtype)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a directory.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if not any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ConfigError(
            f"{folder}: has no tokenizer ({', '.join(_TOKENIZER_FILES)})",
            hint="copy the tokenizer files of the original model into the directory",
        )
    try:
        return import_library().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, which differ from version to version
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder}: transformers does not take the tokenizer: {said}") from error


def _derive_context(config: Any, folder: Path) -> int:
    """Positions there are. Frequencies that change with the longest row would tie a text to its batch: none of those.

    Raises:
        ConfigError: the config does not say.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        raise ConfigError(
            f"{folder / 'config.json'}: max_position_embeddings {limit!r} is no length of a context",
            hint="set it to the number of tokens that the model was trained on",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [section for section in (rope, *rope.values()) if isinstance(section, dict)]
    originals = [s.get("original_max_position_embeddings") for s in sections if s.get("rope_type") == "longrope"]
    return min([limit, *(original for original in originals if original)])


def _find_eos_ids(config: Any, tokenizer: Any, folder: Path) -> frozenset[int]:
    generation = load_generation_config(folder)
    found = (getattr(said, "eos_token_id", None) for said in (generation, config, tokenizer))
    ids = next((each for each in found if each is not None), ())
    return frozenset([ids] if isinstance(ids, int) else ids)
