"""A small random Llama with a byte tokenizer and a chat template as a directory, and `plait serve` as a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Self

from tests.support.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, build_byte_tokenizer

PATIENCE_S = 300
"""For ranks to start on a busy machine."""

CONTEXT = 128
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def save_tiny_model(folder: Path) -> Path:
    """Write a Llama of 6 heads, 3 KV heads and 128 positions.

    Its weights are large, so that other prompts have other answers, and float64, so that the likeliest token is the
    same in whatever batch it is generated.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=VOCAB_SIZE - 1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.copy_(0.4 * torch.randn(param.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_byte_tokenizer(), eos_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class ServeProcess:
    """`plait serve DIR`; in the block the model is up, or the command has ended. Ended with the block."""

    def __init__(self, folder: Path, *arguments: str, key: str | None = None) -> None:
        self._environment = {**os.environ, **({} if key is None else {"PLAIT_API_KEY": key})}
        self._command = [sys.executable, "-m", "plait", "serve", str(folder), "--port", "0", *arguments]
        self._log = NamedTemporaryFile(prefix="plait-serve-", suffix=".log")  # noqa: SIM115 (closed with the block)
        self.api = ""

    def __enter__(self) -> Self:
        """Start it, and wait for the URL."""
        self.process = subprocess.Popen(
            self._command, env=self._environment, text=True, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        try:
            self.api = self.process.stdout.readline().strip()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"--- stderr of the server\n{self.stderr}")
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._log.close()

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return Path(self._log.name).read_text()

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def rank_pids(self) -> list[int]:
        """The processes of its ranks, in rank order: they are started one after another."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


def run_serve(arguments: Sequence[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end, which is soon: something that it is given cannot work."""
    return subprocess.run(
        [sys.executable, "-m", "plait", "serve", *arguments],
        env={**os.environ, **environment}, text=True, capture_output=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
