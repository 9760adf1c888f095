"""Turning text into tokens, once: by one rank, into a file that later runs find again."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from plait.comm.agree import share, together
from plait.comm.mesh import Mesh
from plait.config.data import END_OF_TEXT, DataConfig
from plait.config.run import AnyRun
from plait.errors import ConfigError
from plait.train.corpus.sources import list_files, read_documents
from plait.train.corpus.tokens import TokenStream, TokenWriter
from plait.train.corpus.windows import Windows

_BATCH_CHARACTERS = 4_000_000
"""Text given to the tokenizer at once: enough for all its threads, little enough to hold."""
_ASK_EVERY_S = 2.0
"""How often the waiting ranks ask whether the tokens are there; well below any timeout of a collective."""


def load_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    """Read the tokenizer and check that the model has a row for each of its tokens.

    Raises:
        ConfigError: there is no such file, it is no tokenizer, or its vocabulary is larger than the model's.
    """
    assert config.tokenizer is not None, config
    if not Path(config.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer: {config.tokenizer}: no such file")
    try:
        tokenizer = Tokenizer.from_file(config.tokenizer)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"data.tokenizer: {config.tokenizer}: is no JSON file of `tokenizers` ({error})") from error
    needed = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if needed > vocab_size:
        raise ConfigError(
            f"data.tokenizer: {config.tokenizer} has token ids up to {needed - 1}, and the model has "
            f"model.vocab_size = {vocab_size} rows",
            hint=f"set model.vocab_size = {needed}, or use the tokenizer of this model",
        )
    return tokenizer


def find_end_of_text(tokenizer: Tokenizer, config: DataConfig) -> int:
    """Id of the token that is put after every document.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    names = (config.end_of_text,) if config.end_of_text is not None else END_OF_TEXT
    found = [identifier for name in names if (identifier := tokenizer.token_to_id(name)) is not None]
    if not found:
        raise ConfigError(
            f"data.tokenizer: {config.tokenizer} has no token {' or '.join(names)} to put between documents",
            hint="set data.end_of_text to the token that separates documents",
        )
    return found[0]


def find_document_end(run: AnyRun) -> int | None:
    """Id of the token that ends a document, where attention stays within documents.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    data = run.data
    if data is None or not data.mask_documents:
        return None
    if data.end_of_text_id is not None:
        return data.end_of_text_id
    return find_end_of_text(load_tokenizer(data, run.model.vocab_size), data)


def check_data(run: AnyRun) -> None:
    """Check, without other ranks and before any of them waits, all of the data that can be checked without reading it.

    Raises:
        ConfigError: missing or empty files, token files that are too short, a tokenizer that does not fit the model.
    """
    if run.data is None:
        raise ConfigError("data: is required for training", hint="add a [data] table with kind and paths to the config")
    files = list_files(run.data)
    if run.data.kind == "tokens":
        Windows(TokenStream.from_files(files), run.seq_len, run.seed)
        find_document_end(run)
    else:
        find_end_of_text(load_tokenizer(run.data, run.model.vocab_size), run.data)


def prepare_tokens(run: AnyRun, mesh: Mesh) -> TokenStream:
    """The tokens of the run's data, on every rank of the mesh.

    Rank 0 tokenises text that was not tokenised before. That may take longer than a collective may wait, so meanwhile
    all ranks ask each other every few seconds whether it is done.

    Raises:
        ConfigError: on every rank, if the data cannot be used.
    """
    with ThreadPoolExecutor(1) as worker:
        files: Future[list[Path]] | None = worker.submit(build_token_files, run) if mesh.rank == 0 else None
        while True:
            is_done = files is not None and _wait(files)
            with together(mesh):
                found = files.result() if files is not None and is_done else []
            if share(is_done, mesh)[0]:
                break
    with together(mesh):
        return TokenStream.from_files(share(found, mesh)[0])


def _wait(future: Future[list[Path]]) -> bool:
    deadline = time.monotonic() + _ASK_EVERY_S
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return future.done()


def build_token_files(run: AnyRun) -> list[Path]:
    """Token files of the run's data: those the user named, or the one that its text is turned into.

    Raises:
        ConfigError: the data cannot be used.
    """
    assert run.data is not None, run.name
    files = list_files(run.data)
    if run.data.kind == "tokens":
        _check_ids(files, run.model.vocab_size)
        return files
    target = Path(run.out_dir) / "cache" / f"tokens-{derive_digest(run.data, files)}.npy"
    if not target.exists():
        try:
            _write_tokens(run, files, target)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written ({error.strerror})", hint="set out_dir") from error
    return [target]


def _check_ids(files: Sequence[Path], vocab_size: int) -> None:
    for file in files:
        outside = TokenStream.from_files([file]).find_outside(vocab_size)
        if outside is not None:
            raise ConfigError(f"{file}: has token id {outside}, and the model has model.vocab_size = {vocab_size} rows")


def derive_digest(config: DataConfig, files: Sequence[Path]) -> str:
    """Key of the cached tokens: changes with the tokenizer, the settings, and the path, size and time of any file."""
    assert config.tokenizer is not None, config
    digest = blake2b(Path(config.tokenizer).read_bytes(), digest_size=8)
    digest.update(repr((config.kind, config.text_key, config.end_of_text)).encode())
    for file in files:
        status = file.stat()
        digest.update(repr((str(file.resolve()), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _write_tokens(run: AnyRun, files: Sequence[Path], target: Path) -> None:
    assert run.data is not None, run.name
    tokenizer = load_tokenizer(run.data, run.model.vocab_size)
    end = find_end_of_text(tokenizer, run.data)
    Console(stderr=True, soft_wrap=True).print(f"turning {len(files)} files into tokens, once: {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TokenWriter(target, run.model.vocab_size) as writer:
        for documents in _batch(document for file in files for document in read_documents(run.data, file)):
            for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
                writer.append([*encoding.ids, end])


def _batch(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
