"""Whole vLLMs that answer commands, in an environment of their own: lines of JSON on two pipes.

    python -m bench.driver.vllm_engine READ_FD WRITE_FD

vLLM is imported once. Each engine is a fork of the process that has it, so it starts in a few
seconds, and nothing of it is left when it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final, TextIO

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPTS: Final = 4
FIRST_TOKENS: Final = 200
NEW_TOKENS: Final = 16
BLOCK_TOKENS: Final = 32
HOST_BYTES: Final = 64 * 2**20
VOCABULARY: Final = 512


def make(folder: str, seed: int) -> None:
    """A Llama of 2.6 M random parameters, large enough that other rows give other tokens."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.15, **size, **heads)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def start(model: str, tiers: list[dict[str, Any]]) -> LLM:
    more: dict[str, Any] = {}
    if tiers:
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "bench.driver.vllm_on_cpu"}
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                **spec,
                "cpu_bytes_to_use": HOST_BYTES,
                "secondary_tiers": tiers,
            },
        )
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=True,
        seed=0,
        **more,
    )


def generate(engine: LLM, salt: str) -> dict[str, Any]:
    """Tokens, log-probabilities and cached tokens of each prompt, and the seconds of all."""
    chosen = torch.Generator().manual_seed(7)
    prompts = [
        {"prompt_token_ids": torch.randint(3, VOCABULARY, (length,), generator=chosen).tolist()}
        | ({"cache_salt": salt} if salt else {})
        for length in range(FIRST_TOKENS, FIRST_TOKENS + 16 * PROMPTS, 16)
    ]
    greedy = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, logprobs=1, ignore_eos=True, detokenize=False
    )
    begun = time.monotonic()
    outputs = engine.generate(prompts, greedy, use_tqdm=False)
    seconds = time.monotonic() - begun
    rows = []
    for one in outputs:
        (answer,) = one.outputs
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [of[token].logprob for token, of in pairs]
        row = {"tokens": list(answer.token_ids), "logprobs": logprobs}
        rows.append({**row, "prompt": len(one.prompt_token_ids), "cached": one.num_cached_tokens})
    return {"rows": rows, "seconds": seconds}


def serve(command: dict[str, Any], commands: TextIO, replies: TextIO) -> None:
    """An engine, until the command to end it."""
    engine = start(command["model"], command["tiers"])
    say(replies, ready=True)
    for line in commands:
        command = json.loads(line)
        if command["do"] == "end":
            return
        if command["do"] == "reset":
            say(replies, reset=engine.reset_prefix_cache(reset_connector=True))
        else:
            say(replies, **generate(engine, command["salt"]))


def say(replies: TextIO, **reply: Any) -> None:
    print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as commands, os.fdopen(int(sys.argv[2]), "w") as replies:
        for line in commands:
            command = json.loads(line)
            if command["do"] == "make":
                make(command["model"], command["seed"])
                say(replies, made=True)
                continue
            pid = os.fork()
            if not pid:
                serve(command, commands, replies)
                os._exit(0)
            say(replies, ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
