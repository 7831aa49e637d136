"""`generate` of a Llama-architecture model whose attention and KV cache attnd serves.

    python examples/transformers_generate.py [--size small|1b] [--shared N]
                                             [--tokens-only] [--rounds N] [--compile]
                                             [--beside eager,sdpa,static] [--out FILE]
                                             [--dtype fp32|fp16|bf16] [--backend cpu|cuda]
                                             [--gpu N] [--url http://127.0.0.1:8080]

The model is transformers' own, built from a configuration with seeded random weights (nothing is
downloaded). Its batch of prompts, padded on the left, begins with a system prompt that all share:
it is computed once and forked for each. The same batch is then generated with eager attention and
transformers' own cache: those are the tokens to meet.

On a CPU the model is float32. With an fp32 pool every token must be equal; fp16 and bf16 pools
round K and V, so a near-tie may fall the other way. No logit may be off by more than the bound of
generations.py, which leaves two tokens that swapped within twice that of each other. Else the exit
status is 1. On a GPU the model has the pool's dtype, and both sides round.

At the end the same batch is timed with attnd and with what transformers has itself: eager and sdpa
attention, a static cache, and that one compiled (on a GPU, or with --compile). The prefill is timed
apart for all of them. With --gpu the model has that GPU, and the engine the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from attnd import Client, Session
from attnd.transformers import AttndCache, pool_settings
from attnd.transformers.releases import CACHE
from generations import COMPILED, Contender, Generation, compare, compare_speed
from local_model import DEVICE, PAGE_SIZE, SIZES, TORCH, Batch, build_model, make_batch
from local_service import metric, serve
from transformers import CompileConfig

ARENA_BYTES: Final = 16 * 2**30
"""Of the GPU, for the slots of a whole batch's prefill at once."""
Model = Any
"""A LlamaForCausalLM; transformers' own annotations do not pass a strict checker."""


def main() -> None:
    chosen = arguments()
    if DEVICE == "cuda":
        torch.cuda.set_device(chosen.gpu)
    size = SIZES[chosen.size]
    shared = size.shared if chosen.shared is None else chosen.shared
    model = build_model(size, chosen.dtype, shared)
    batch = make_batch(size, shared)
    settings = {
        **pool_settings(model, chosen.dtype),
        "pool.page-size": PAGE_SIZE,
        "pool.num-pages": batch.pages,
        "backend.kind": chosen.backend,
        "server.device-arena-bytes": ARENA_BYTES,
    }
    with open_service(chosen.url, settings, chosen.backend) as service:
        served = generate_served(model, service, chosen.dtype, batch)
        reference = generate(model, batch, size.reference)
        compare(served, reference, chosen.dtype, size.reference)
        if chosen.tokens_only:
            return
        model.set_attn_implementation("attnd")
        with AttndCache(service.session, model, dtype=chosen.dtype) as cache:
            known = contenders(model, cache, batch, chosen.compile)
            known = [one for one in known if one.kind in {"attnd", *chosen.beside.split(",")}]
            speeds = compare_speed(known, batch, chosen.rounds)
    if chosen.out is not None:
        figures = {name: asdict(speed) for name, speed in speeds.items()}
        chosen.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Llama model served by attnd")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--shared", type=int, help="tokens that all prompts begin with")
    parser.add_argument("--tokens-only", action="store_true", help="leave the timing out")
    parser.add_argument("--rounds", type=int, default=3, help="of timing; the best counts")
    parser.add_argument("--compile", action="store_true", help="time torch.compile on a CPU too")
    parser.add_argument(
        "--beside", default="eager,sdpa,static", help="what of transformers to time"
    )
    parser.add_argument("--out", type=Path, help="where to put the times, as JSON")
    parser.add_argument("--url", help="of a running service; default: start one")
    parser.add_argument("--dtype", choices=list(TORCH), default="fp32", help="of the pool")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu", type=int, default=0, help="of the model; the engine has the first")
    chosen = parser.parse_args()
    if chosen.backend == "cuda" and chosen.dtype == "fp32":
        parser.error("the cuda backend has no fp32 pools: add --dtype fp16 or --dtype bf16")
    return chosen


@dataclass(frozen=True, slots=True)
class Service:
    """A service: `client` for its metrics, `session` for the cache. On another host, a client."""

    client: Client
    session: Any


@contextmanager
def open_service(url: str | None, settings: dict[str, object], backend: str) -> Iterator[Service]:
    """The service at `url`, or one that is started with `settings`."""
    if url is not None:
        with Client(url) as client:
            yield Service(client, client)
        return
    with serve(settings) as uds, Client(uds=uds) as client, session(f"{uds}.road", backend) as road:
        yield Service(client, road)


def session(path: str, backend: str) -> Any:
    """Of host memory, or of device memory where the service and the model are on GPUs."""
    if backend == "cuda" and DEVICE == "cuda":
        from attnd.torch import TorchSession

        return TorchSession(path, arena_bytes=2**30)
    return Session(path)


@torch.inference_mode()
def generate(model: Model, batch: Batch, attention: str, cache: Any = None) -> Generation:
    """The greedy continuations of a batch; without a cache, with transformers' own."""
    model.set_attn_implementation(attention)
    output = model.generate(
        batch.ids,
        attention_mask=batch.mask,
        **{CACHE: cache},
        max_new_tokens=batch.new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[:, batch.ids.shape[1] :].tolist()
    return Generation(tokens, list(torch.stack(output.logits, dim=1).float().cpu()))


def generate_served(model: Model, service: Service, dtype: str, batch: Batch) -> Generation:
    """The same with K and V in attnd; prints the reads that a common prefix saved."""
    model.set_attn_implementation("attnd")
    before = kv_bytes(service.client)
    with AttndCache(service.session, model, dtype=dtype) as cache:
        shared = cache.share_prefix(model, batch.ids, batch.mask)
        served = generate(model, batch, "attnd", cache)
    read, saved = (now - then for now, then in zip(kv_bytes(service.client), before, strict=True))
    about = f"a {model.dtype} model on {DEVICE}, its KV in {dtype}".replace("torch.", "")
    print(f"served: {about}; {batch.rows} prompts of {int(batch.mask.sum())} tokens, ", end="")
    print(f"{shared} of them not computed again")
    print(f"KV bytes read: {read:.0f}, saved by sharing: {saved:.0f}", end=" ")
    print(f"({saved / (read + saved):.0%} of what flat attention reads)")
    return served


def kv_bytes(client: Client) -> tuple[float, float]:
    """Bytes of KV read so far, and saved by reading shared KV once."""
    read, saved = "attnd_kv_bytes_read_total", "attnd_kv_bytes_saved_total"
    return metric(client, read), metric(client, saved)


def contenders(model: Model, cache: AttndCache, batch: Batch, compile: bool) -> list[Contender]:
    """attnd with and without the shared prefix, and all that transformers offers here."""

    def own(attention: str, **options: Any) -> Callable[[int], None]:
        return lambda count: run_once(model, batch, attention, count, **options)

    def served(share: bool, graphs: bool = False) -> Callable[[int], None]:
        def run(count: int) -> None:
            cache.reset()
            if share:
                model.set_attn_implementation("attnd")
                cache.share_prefix(model, batch.ids, batch.mask)
            with cache.graphs(model) if graphs else nullcontext():
                run_once(model, batch, "attnd", count, **{CACHE: cache})

        return run

    compiled = {"cache_implementation": "static", "compile_config": compile_config()}
    plain = {"cache_implementation": "static", "disable_compile": True}
    found = [
        Contender("attnd, prefix shared", "attnd", served(True)),
        Contender("attnd", "attnd", served(False)),
        Contender("eager", "eager", own("eager")),
        Contender("sdpa", "sdpa", own("sdpa")),
        Contender("sdpa, static cache", "static", own("sdpa", **plain)),
    ]
    if cache.has_steps:
        found.insert(2, Contender("attnd, shared, graphs", "attnd", served(True, True), 4))
    if DEVICE == "cuda" or compile:
        found.append(Contender(COMPILED, "static", own("sdpa", **compiled), batch.new_tokens))
    return found


def compile_config() -> CompileConfig:
    """As transformers compiles on a GPU, on any device."""
    config = CompileConfig()
    config._compile_all_devices = True
    return config


@torch.inference_mode()
def run_once(model: Model, batch: Batch, attention: str, count: int, **options: Any) -> None:
    model.set_attn_implementation(attention)
    model.generate(
        batch.ids,
        attention_mask=batch.mask,
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        **options,
    ).cpu()


if __name__ == "__main__":
    main()
