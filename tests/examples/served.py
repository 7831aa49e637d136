"""examples/serve as a process of its own, with a tiny model or the default one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from transformers import PreTrainedTokenizerFast

from bench.driver.servers import free_port
from tests.examples.tiny_decoders import llama
from tests.harness import processes
from tests.harness.plain_http import status_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = "You answer in the fewest words that will do, and never begin with a greeting. " * 2


def save_tiny(path: Path) -> Path:
    """Save a Llama of random weights over bytes, as transformers saves models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab={"<end>": 0}
            | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    model = llama(3, max_position_embeddings=4096, eos_token_id=0)
    torch.nn.init.zeros_(model.lm_head.weight[0])  # answers do not end by themselves
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


@dataclass
class Server:
    process: processes.Process
    url: str
    attnd: str
    openai: openai.OpenAI

    def preemptions(self) -> int:
        found: int = httpx.get(f"{self.url}/health").json()["preemptions"]
        return found

    def chat(self, question: str, **options: Any) -> Any:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        given = {"model": "tiny", "temperature": 0, "max_tokens": 40, **options}
        return self.openai.chat.completions.create(messages=messages, **given)


@contextmanager
def running(folder: Path | None, *options: str) -> Iterator[Server]:
    port, attnd = free_port(), free_port()
    command = [sys.executable, "-m", "examples.serve"]
    command += [] if folder is None else ["--model", str(folder)]
    command += ["--port", str(port), "--attnd-port", str(attnd), *options]
    url = f"http://127.0.0.1:{port}"
    with processes.running(command, {"HF_HUB_OFFLINE": "1"}) as process:
        process.wait_for(lambda: is_up(url), "the server")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield Server(process, url, f"http://127.0.0.1:{attnd}", client)
        assert process.stop() == 0, process.lines


def is_up(url: str) -> bool:
    try:
        return status_of(f"{url}/health") == 200
    except httpx.TransportError:
        return False
