"""Real weights behind the server: what clients get is what transformers itself generates."""

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.served_model import PATIENCE_S, ServeProcess
from tests.support.smollm2 import smollm2_folder

QUESTIONS = ["What is the capital of France?", "Name a colour.", "How many legs does a spider have?"]
NUM_TOKENS = 12

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)


def generate_alone(folder: Path) -> list[str]:
    """What transformers answers to each question, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    texts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**asked, do_sample=False, max_new_tokens=NUM_TOKENS)
        texts.append(tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


async def ask(client: AsyncOpenAI, question: str) -> str:
    stream = await client.chat.completions.create(
        model="SmolLM2", messages=[{"role": "user", "content": question}], max_tokens=NUM_TOKENS, temperature=0,
        stream=True,
    )  # fmt: skip
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def ask_all(api: str) -> list[str]:
    async with AsyncOpenAI(base_url=api, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(ask(client, question) for question in QUESTIONS))


def test_answers_to_clients_are_those_of_transformers() -> None:
    folder = smollm2_folder()
    with ServeProcess(folder, "--tp", "2", "--model-name", "SmolLM2") as server:
        texts = asyncio.run(ask_all(server.api))
    assert "Paris" in texts[0]
    assert texts == generate_alone(folder)
