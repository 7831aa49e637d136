"""Two generations of the same batch compared: token by token, and by the clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from local_model import Batch

LOGIT_BOUNDS: Final = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 5e-1}
"""Largest difference of logits by rounding, for a standard deviation of up to 2."""
COMPILED: Final = "sdpa, static, compiled"

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens of each continuation, and the logits `[new tokens, vocab]` they were chosen by."""

    tokens: list[Tokens]
    logits: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One continuation, up to and including the first token that differs.

    `equal`: number of equal tokens before it. `error`: largest difference of logits. `closest`:
    least gap between the reference's two best logits. `flipped`: the token that differs, and the
    reference's gap between both.
    """

    equal: int
    error: float
    closest: float
    flipped: str | None


def compare_one(
    tokens: Tokens, expected: Tokens, logits: torch.Tensor, reference: torch.Tensor
) -> Comparison:
    """Compare served and expected tokens and their logits `[new tokens, vocab]`."""
    pairs = list(zip(tokens, expected, strict=True))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    ours, theirs = logits[: equal + 1], reference[: equal + 1]
    best = theirs.topk(2, dim=-1).values
    flipped = None
    if equal < len(pairs):
        got, wanted = pairs[equal]
        gap = (theirs[equal, wanted] - theirs[equal, got]).item()
        flipped = f"token {equal}: {got} for {wanted}, whose logits are {gap:.1e} apart"
    error = (ours - theirs).abs().max().item()
    return Comparison(equal, error, (best[:, 0] - best[:, 1]).min().item(), flipped)


def compare(served: Generation, own: Generation, dtype: str, attention: str = "eager") -> None:
    """Print equal tokens and differences of logits; SystemExit if these are too large."""
    both = (served.tokens, own.tokens, served.logits, own.logits)
    each = [compare_one(*continuation) for continuation in zip(*both, strict=True)]
    deviation = torch.stack(own.logits).std().item()
    error = torch.tensor([one.error for one in each]).max().item()  # NaN if there is one
    bound = LOGIT_BOUNDS[dtype] * max(1.0, deviation / 2)
    print(f"logits differ by at most {error:.1e} (standard deviation {deviation:.1f})", end=", ")
    print(f"the two best are never closer than {min(one.closest for one in each):.1e}")
    for name, one in enumerate(each):
        if one.flipped is not None:
            print(f"continuation {name} diverges at {one.flipped}")
    equal, total = sum(one.equal for one in each), sum(map(len, own.tokens))
    print(f"{equal} of {total} tokens equal to {attention} attention before any divergence")
    if not error <= bound or (dtype == "fp32" and equal < total):
        raise SystemExit(f"FAILED: logits may differ by {bound:g} at {dtype}: not the same model")
    print("token for token equal" if equal == total else "equal but for near-ties")


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to generate the batch: `run(n)` is one `generate` of n tokens a row."""

    name: str
    kind: Literal["attnd", "eager", "sdpa", "static"]
    run: Callable[[int], None]
    first_run: int = 2  # tokens of the warm-up


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to the first tokens; tokens a second of all rows after them, and in all."""

    first_s: float
    decode: float
    whole: float


def compare_speed(contenders: list[Contender], batch: Batch, rounds: int) -> dict[str, Speed]:
    """Time every contender, print which is faster, and return their speeds."""
    speeds = timed(contenders, batch, rounds)
    for name, speed in speeds.items():
        print(f"{name:22}: first tokens after {speed.first_s:.2f} s, ", end="")
        print(f"then {speed.decode:.1f} tokens/s; {speed.whole:.1f} tokens/s with the prefill")
    if COMPILED not in {one.name for one in contenders}:
        print(f"{COMPILED}: skipped on a CPU, where compiling takes minutes; --compile includes it")
    served = {one.name for one in contenders if one.kind == "attnd"}
    ours = [speed for name, speed in speeds.items() if name in served]
    others = {name: speed for name, speed in speeds.items() if name not in served}
    if not others:
        return speeds
    for name, rate in RATES.items():
        best = max(others, key=lambda name: rate(others[name]))
        ratio = max(map(rate, ours)) / rate(others[best])
        verdict = "faster than" if ratio > 1 else "slower than"
        print(f"{name}, attnd has {ratio:.2f} x the tokens/s of {best}, ", end="")
        print(f"the fastest that transformers has here: attnd is {verdict} in-process")
    return speeds


RATES: Final[dict[str, Callable[[Speed], float]]] = {
    "prefill excluded": lambda speed: speed.decode,
    "prefill included": lambda speed: speed.whole,
}


def timed(contenders: list[Contender], batch: Batch, rounds: int) -> dict[str, Speed]:
    """The best of `rounds` rounds, in which contenders take turns after a warm-up of each."""
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    for one in contenders:
        began = time.perf_counter()
        try:
            one.run(one.first_run)
            seconds[one.name] = ([], [])
            print(f"{one.name}: first run {time.perf_counter() - began:.1f} s", file=sys.stderr)
        except torch.OutOfMemoryError:
            print(f"{one.name:22}: more memory than the device has")
    for _ in range(rounds):
        for one in contenders:
            if one.name in seconds:
                for times, count in zip(seconds[one.name], (1, batch.new_tokens), strict=True):
                    began = time.perf_counter()
                    one.run(count)
                    times.append(time.perf_counter() - began)
    return {
        name: speed_of(min(first), min(whole), batch) for name, (first, whole) in seconds.items()
    }


def speed_of(first_s: float, whole_s: float, batch: Batch) -> Speed:
    rest = batch.rows * (batch.new_tokens - 1) / max(whole_s - first_s, 1e-9)
    return Speed(first_s, rest, batch.rows * batch.new_tokens / whole_s)
