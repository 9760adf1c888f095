"""Where the tokens come from."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plait.config.section import Problem, Section

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""What tokenizers call the token that ends a document, the most usual one first."""


def _wrap_single(value: Any) -> Any:
    """`paths = "corpus.txt"` means a list of one."""
    return (value,) if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]


class DataConfig(Section):
    """Input files and how they become tokens; relative paths start at the working directory."""

    kind: Literal["text", "jsonl", "tokens"]
    """Plain text, one JSON object a line, or token ids written before."""
    paths: Annotated[tuple[NonEmpty, ...], Field(strict=False), BeforeValidator(_wrap_single)]
    """Files, folders (every file below, hidden ones aside) or glob patterns (`src/**/*.py`)."""
    tokenizer: NonEmpty | None = None
    """A JSON file of the `tokenizers` library."""
    text_key: NonEmpty = "text"
    """The key of a JSON line that holds the text."""
    end_of_text: NonEmpty | None = None
    """The token put after every document; the tokenizer's usual one unless given."""
    end_of_text_id: Annotated[int, Field(ge=0)] | None = None
    """Its id, in token files without a tokenizer."""
    mask_documents: bool = False
    """Whether attention stays within documents, of which sequences have several: each is then computed as if it were
    alone, its positions count from 0, and no token is predicted from the document before. A document that a sequence
    cuts is two."""

    def conflicts(self) -> Iterator[Problem]:
        """There must be something to read, and a tokenizer where it is text."""
        if not self.paths:
            yield Problem("paths", "is empty")
        if self.kind != "tokens" and self.tokenizer is None:
            text = f'is required: data of kind "{self.kind}" has to be turned into tokens'
            hint = "name a tokenizer.json, as Hugging Face models have one, and `make demo` leaves one in runs/demo"
            yield Problem("tokenizer", text, hint)
        if self.end_of_text_id is not None and self.kind != "tokens":
            yield Problem("end_of_text_id", "is for token files", "set end_of_text to the token that ends a document")
        if self.mask_documents and self.kind == "tokens" and self.tokenizer is None and self.end_of_text_id is None:
            text = "nothing says which token of the token files ends a document"
            yield Problem("mask_documents", text, "set data.end_of_text_id, or data.tokenizer")
