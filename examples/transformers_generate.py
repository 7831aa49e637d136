"""Greedy generation with a Llama-architecture model whose attention and KV cache attnd serves.

    python examples/transformers_generate.py [--dtype fp32|fp16|bf16] [--backend cpu|cuda]
                                             [--url http://127.0.0.1:8080]

The model is transformers' own, built from a configuration with seeded random weights (nothing is
downloaded), float32, on a GPU where torch has one. Its attention goes through transformers'
AttentionInterface: every layer sends its new q, k and v to the service, which appends k and v and
answers the attention. A system prompt is prefilled once; eight continuations are forked from it and
generated as one batch. The same model on the same device then generates each continuation by itself
with eager attention and its own cache, all in float32: those are the tokens to meet. At the end the
same batch, padded on the left, is timed with transformers' own eager and sdpa attention.

With an fp32 pool (cpu backend) every token must be equal. fp16 and bf16 pools round q, K and V, so
a near-tie may fall the other way. No logit may be off by more than LOGIT_BOUNDS, which leaves two
tokens that swapped within twice that of each other. Else the exit status is 1.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from attnd import Client, NewSequence
from local_service import metric, open_client
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

SEED = 20
SYSTEM_TOKENS = 200  # not a multiple of the page: forks copy the rows of the last one
SUFFIX_TOKENS = (3, 16, 1, 24, 7, 11, 2, 30)
NEW_TOKENS = 32
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 8, 2, 64

DTYPES: Final[dict[str, Any]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
LOGIT_BOUNDS: Final = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 5e-1}
"""Greatest difference of logits (their standard deviation is about 2) that is still rounding."""

Tokens = list[int]
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
Model = Any
"""A LlamaForCausalLM; transformers' own annotations do not pass a strict checker."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A Llama model served by attnd")
    parser.add_argument("--url", help="of a running service; default: start one")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the pool")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if arguments.backend == "cuda" and arguments.dtype == "fp32":
        parser.error("the cuda backend has no fp32 pools: add --dtype fp16 or --dtype bf16")
    torch.manual_seed(SEED)
    model = build_model()
    system = random_tokens(SYSTEM_TOKENS)
    suffixes = [random_tokens(count) for count in SUFFIX_TOKENS]
    with open_client(arguments.url, settings(arguments.dtype, arguments.backend)) as client:
        check_pool(client, arguments.dtype)
        served = generate_served(model, client, arguments.dtype, system, suffixes)
    prompts = [system + suffix for suffix in suffixes]
    eager = generate_eager(model, prompts)
    compare(served, eager, arguments.dtype)
    compare_speed(model, prompts, served.speed)


def settings(dtype: str, backend: str) -> dict[str, object]:
    """A pool of the model's shape."""
    return {
        "pool.num-layers": LAYERS,
        "pool.num-kv-heads": KV_HEADS,
        "pool.head-dim": HEAD_DIM,
        "pool.page-size": 16,
        "pool.num-pages": 128,
        "pool.dtype": dtype,
        "backend.kind": backend,
    }


def check_pool(client: Client, dtype: str) -> None:
    """SystemExit when the service at --url was started for another model."""
    info = client.info()
    shape = (info.num_layers, info.num_kv_heads, info.head_dim, info.dtype)
    if shape != (LAYERS, KV_HEADS, HEAD_DIM, dtype):
        wanted = " ".join(f"--{name} {value}" for name, value in settings(dtype, "auto").items())
        raise SystemExit(f"this service has another pool; start it with {wanted}")


def build_model() -> Model:
    """Random weights, wide enough that attention is far from uniform and logits are apart."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Model = LlamaForCausalLM(config)
    return model.eval().to(DEVICE)


def random_tokens(count: int) -> Tokens:
    tokens: Tokens = torch.randint(0, 1024, (count,)).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Served:
    """What attention needs to know about a packed batch.

    Rows `indptr[b]:indptr[b+1]` are the new tokens of `sequences[b]`, which holds `offsets[b]`.
    """

    client: Client
    dtype: Any
    sequences: list[str]
    indptr: list[int]
    offsets: list[int]


def attnd_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    served: Served,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention over HTTP: append the new k and v, attend all there is.

    `query [1, num_qo_heads, rows, head_dim]`, `key, value [1, num_kv_heads, rows, head_dim]`, the
    rows of all sequences packed; answers `[1, rows, num_qo_heads, head_dim]`. transformers makes no
    mask for an attention it does not know: the service's causal rule is the whole mask.
    """
    q, k, v = (x[0].transpose(0, 1).cpu().numpy().astype(served.dtype) for x in (query, key, value))
    layer, sequences, indptr = module.layer_idx, served.sequences, served.indptr
    common: dict[str, Any] = {"k": k, "v": v, "offsets": served.offsets, "sm_scale": scaling}
    if len(q) == len(sequences):
        result = served.client.decode(layer, sequences, q, **common)
    else:
        result = served.client.prefill(layer, sequences, q, indptr, causal=True, **common)
    return torch.from_numpy(result.o.astype(np.float32))[None].to(DEVICE), None


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one batch: seconds to every sequence's first token, and tokens a second after that."""

    first_s: float
    tokens_per_s: float

    def told(self) -> str:
        return f"first tokens after {self.first_s:.2f} s, then {self.tokens_per_s:.1f} tokens/s"


@dataclass(frozen=True, slots=True)
class Generation:
    """Per continuation: the tokens, and the logits `[NEW_TOKENS, vocab]` each was chosen from."""

    tokens: list[Tokens]
    logits: list[torch.Tensor]
    speed: Speed = Speed(0.0, 0.0)


@torch.inference_mode()
def generate_served(
    model: Model, client: Client, dtype: str, system: Tokens, suffixes: list[Tokens]
) -> Generation:
    """Prefill the system prompt once, fork it, and generate all continuations as one batch."""
    AttentionInterface.register("attnd", attnd_attention)
    model.set_attn_implementation("attnd")
    before = kv_bytes(client)
    print(f"served: a float32 model on {DEVICE}, its KV in {dtype}", flush=True)
    began = time.perf_counter()
    root = client.create_sequence().id
    step(model, client, dtype, [root], [0], [system])
    forks = [f.id for f in client.create_sequences([NewSequence(parent=root)] * len(suffixes))]
    lengths = [len(system)] * len(forks)
    logits = step(model, client, dtype, forks, lengths, suffixes)
    lengths = [length + len(suffix) for length, suffix in zip(lengths, suffixes, strict=True)]
    prefilled = time.perf_counter()
    history = [logits]
    for _ in range(NEW_TOKENS - 1):
        chosen = history[-1].argmax(dim=-1).tolist()
        history.append(step(model, client, dtype, forks, lengths, [[token] for token in chosen]))
        lengths = [length + 1 for length in lengths]
    seconds = time.perf_counter() - prefilled
    read, saved = (after - start for after, start in zip(kv_bytes(client), before, strict=True))
    for sequence in [root, *forks]:
        client.delete_sequence(sequence)
    prompt = len(system) + sum(map(len, suffixes))
    speed = Speed(prefilled - began, len(forks) * (NEW_TOKENS - 1) / seconds)
    print(f"served: {prompt} prompt tokens, {len(forks)} x {NEW_TOKENS} tokens:", speed.told())
    print(f"KV bytes read: {read:.0f}, saved by sharing: {saved:.0f}", end=" ")
    print(f"({saved / (read + saved):.0%} of what flat attention reads)")
    stacked = torch.stack(history, dim=1)
    return Generation(stacked.argmax(dim=-1).tolist(), list(stacked), speed)


def step(
    model: Model,
    client: Client,
    dtype: str,
    sequences: list[str],
    lengths: list[int],
    new: list[Tokens],
) -> torch.Tensor:
    """Run the new tokens of every sequence, packed into one row; the logits after the last each."""
    indptr = np.cumsum([0, *map(len, new)]).tolist()
    positions = [
        length + i for length, tokens in zip(lengths, new, strict=True) for i in range(len(tokens))
    ]
    output = model(
        input_ids=torch.tensor([[token for tokens in new for token in tokens]], device=DEVICE),
        position_ids=torch.tensor([positions], device=DEVICE),
        use_cache=False,
        logits_to_keep=torch.tensor(indptr[1:], device=DEVICE) - 1,
        served=Served(client, DTYPES[dtype], sequences, indptr, lengths),
    )
    logits: torch.Tensor = output.logits[0].cpu()
    return logits


def kv_bytes(client: Client) -> tuple[float, float]:
    """Bytes of KV read so far, and saved by reading shared KV once."""
    read, saved = "attnd_kv_bytes_read_total", "attnd_kv_bytes_saved_total"
    return metric(client, read), metric(client, saved)


@torch.inference_mode()
def generate_eager(model: Model, prompts: list[Tokens]) -> Generation:
    """transformers' own generate, eager attention, own cache, one prompt after the other."""
    model.set_attn_implementation("eager")
    tokens, logits = [], []
    began = time.perf_counter()
    for number, prompt in enumerate(prompts, start=1):
        output = model.generate(
            torch.tensor([prompt], device=DEVICE),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=DEVICE),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(output.logits).cpu())
        seconds = time.perf_counter() - began
        print(f"eager: {number} of {len(prompts)} continuations in {seconds:.1f} s", flush=True)
    return Generation(tokens, logits)


def compare_speed(model: Model, prompts: list[Tokens], served: Speed) -> None:
    """Time the same batch with transformers' own attention and cache, and say who is faster."""
    fastest = Speed(0.0, 0.0)
    for attention in ("eager", "sdpa"):
        speed = time_batch(model, prompts, attention)
        print(f"{attention}: the same {len(prompts)} as one padded batch:", speed.told())
        fastest = max(fastest, speed, key=lambda one: one.tokens_per_s)
    ratio = served.tokens_per_s / fastest.tokens_per_s
    verdict = "faster than" if ratio > 1 else "slower than"
    print(f"served generates at {ratio:.2f} x the tokens/s of the faster one: {verdict} in-process")


@torch.inference_mode()
def time_batch(model: Model, prompts: list[Tokens], attention: str) -> Speed:
    """One `generate` of the whole batch, left-padded; its prefill is timed apart."""
    model.set_attn_implementation(attention)
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    inputs, visible = torch.tensor(padded, device=DEVICE), torch.tensor(mask, device=DEVICE)

    def seconds(new_tokens: int) -> float:
        began = time.perf_counter()
        model.generate(
            inputs,
            attention_mask=visible,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        ).cpu()
        return time.perf_counter() - began

    seconds(2)  # what is made once is made here
    first_s = seconds(1)
    rest_s = max(seconds(NEW_TOKENS) - first_s, 1e-9)
    return Speed(first_s, len(prompts) * (NEW_TOKENS - 1) / rest_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One continuation up to and with the first token that differs: its history is still shared.

    `equal` tokens came first; `error` is the logits' greatest difference; `closest` the least gap
    between the reference's two best; `flipped` its gap between the two tokens that differ.
    """

    equal: int
    error: float
    closest: float
    flipped: str | None


def compare_one(
    tokens: Tokens, expected: Tokens, logits: torch.Tensor, reference: torch.Tensor
) -> Comparison:
    """Tokens served and expected, and the logits `[NEW_TOKENS, vocab]` they were chosen from."""
    pairs = list(zip(tokens, expected, strict=True))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), NEW_TOKENS)
    ours, theirs = logits[: equal + 1], reference[: equal + 1]
    best = theirs.topk(2, dim=-1).values
    flipped = None
    if equal < NEW_TOKENS:
        got, wanted = pairs[equal]
        gap = (theirs[equal, wanted] - theirs[equal, got]).item()
        flipped = f"token {equal}: {got} for {wanted}, whose logits are {gap:.1e} apart"
    error = (ours - theirs).abs().max().item()
    return Comparison(equal, error, (best[:, 0] - best[:, 1]).min().item(), flipped)


def compare(served: Generation, eager: Generation, dtype: str) -> None:
    """Say whether every token is equal and how far logits are apart; SystemExit where too far."""
    both = (served.tokens, eager.tokens, served.logits, eager.logits)
    each = [compare_one(*continuation) for continuation in zip(*both, strict=True)]
    error, bound = max(one.error for one in each), LOGIT_BOUNDS[dtype]
    deviation = torch.stack(eager.logits).std().item()
    print(f"logits differ by at most {error:.1e} (standard deviation {deviation:.1f})", end=", ")
    print(f"the two best are never closer than {min(one.closest for one in each):.1e}")
    for name, one in enumerate(each):
        if one.flipped is not None:
            print(f"continuation {name} diverges at {one.flipped}")
    equal, total = sum(one.equal for one in each), NEW_TOKENS * len(each)
    print(f"{equal} of {total} tokens equal to eager attention before any divergence")
    if error > bound or (dtype == "fp32" and equal < total):
        raise SystemExit(f"FAILED: logits may differ by {bound} at {dtype}: not the same model")
    print("token for token equal" if equal == total else "equal but for near-ties")


if __name__ == "__main__":
    main()
