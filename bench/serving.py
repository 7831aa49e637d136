"""Conversations with the serving engine of examples/serve: `python -m bench.serving`.

Conversations of two turns, some of which share a system prompt, all at once; beside transformers'
continuous batching (`generate_batch`) over the same prompts, and on the CPU beside `generate`, one
request at a time (for two of the conversations: its rate is the same for all) and in a padded
batch. Greedy; every answer has the same number of tokens. On the CPU the model is
SmolLM2-135M-Instruct, on a GPU a Llama of 1.2 B parameters with random weights in bf16 that has the
engine in its process. A turn begins when all answers of the turn before are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from attnd.torch import EmbeddedSession, TorchSession
from attnd.transformers import pool_settings
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.driver.servers import attnd
from bench.report.provenance import RESULTS, ROOT, Results, command_line, provenance, publish
from bench.report.serving_results import table
from examples.serve.answers import Delta, Sampling
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler

PAGE_SIZE: Final = 16
TURNS: Final = 2
PACKAGES: Final = ("attnd", "attnd-client", "torch", "transformers")
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """Conversations, and tokens of a system prompt, a question and an answer."""

    chats: int
    system: int
    question: int
    answer: int


WORK: Final = {
    ("cpu", False): Work(8, 128, 16, 24),
    ("cpu", True): Work(4, 64, 16, 8),
    ("cuda", False): Work(64, 2048, 128, 128),
    ("cuda", True): Work(16, 512, 32, 32),
}
"""By backend, and whether the run is quick."""


@dataclass(slots=True)
class Turn:
    """The answers to prompts, when each token came, and prompt tokens that were cached."""

    answers: Prompts
    times: list[list[float]]
    cached: int | None = None


Way = Callable[[Prompts, int], Turn]
"""Answers all prompts with `count` tokens each; times are seconds by `time.perf_counter`."""


def replay(way: Way, work: Work, source: list[int], prompts_of_system: int) -> dict[str, Any]:
    """All turns of all conversations; `prompts_of_system` of them share a system prompt."""

    def cut(kind: int, number: int, count: int) -> list[int]:
        begin = (kind * 7919 + number * 6007) % (len(source) - count)
        return source[begin : begin + count]

    chats = [cut(1, chat // prompts_of_system, work.system) for chat in range(work.chats)]
    took, tokens, cached, firsts, gaps = 0.0, 0, list[int | None](), list[float](), list[float]()
    for turn in range(TURNS):
        for number, chat in enumerate(chats):
            chat += cut(2 + turn, number, work.question)
        begun = time.perf_counter()
        done = way([list(chat) for chat in chats], work.answer)
        took += time.perf_counter() - begun
        tokens += sum(map(len, chats))
        cached.append(done.cached)
        firsts += [times[0] - begun for times in done.times]
        gaps += [gap for times in done.times for gap in np.diff(times)]
        for chat, answer in zip(chats, done.answers, strict=True):
            chat += answer
    hit = None if None in cached else round(sum(one or 0 for one in cached) / tokens, 3)
    return {
        "tokens_s": round(TURNS * work.chats * work.answer / took, 1),
        "first_ms": [round(float(ms) * 1e3, 1) for ms in np.percentile(firsts, (50, 99))],
        "between_ms": [round(float(ms) * 1e3, 1) for ms in np.percentile(gaps, (50, 99))],
        "hit_rate": hit,
        "tokens": [chat[-work.answer :] for chat in chats],
    }


class NoText:
    """A tokenizer for a model of random weights: its tokens have no text."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


@contextmanager
def engine(model: Any, tokenizer: Any, work: Work, backend: str) -> Iterator[Way]:
    """The serving engine of examples/serve, in this process, over an attnd of its own."""
    rows, prompt_tokens = work.chats, 2048 if backend == "cuda" else 512
    tokens = work.system + TURNS * (work.question + work.answer)
    settings: dict[str, object] = pool_settings(model) | {
        "backend.kind": backend,
        "pool.page-size": PAGE_SIZE,
        "pool.num-pages": 3 * work.chats * (tokens // PAGE_SIZE + 2),
        "log.level": "warning",
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with ExitStack() as stack:
        connect: Callable[[], TorchSession] = partial(EmbeddedSession, settings)
        if backend == "cpu":
            server = stack.enter_context(attnd(*options, kind=backend))
            connect = partial(TorchSession, server.socket)
        runner = Runner(model, connect, rows, rows + prompt_tokens)
        scheduler = Scheduler(runner, tokenizer, set())
        scheduler.start()
        try:
            yield lambda prompts, count: served(scheduler, prompts, count)
        finally:
            scheduler.close()


def served(scheduler: Scheduler, prompts: Prompts, count: int) -> Turn:
    times: list[list[float]] = [[] for _ in prompts]
    over = threading.Semaphore(0)

    def emit(number: int) -> Callable[[Delta], None]:
        def note(delta: Delta) -> None:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            times[number].append(time.perf_counter())
            if delta.finish:
                over.release()

        return note

    sampling = Sampling(count, temperature=0)
    requests = [scheduler.submit(one, sampling, 1, emit(at)) for at, one in enumerate(prompts)]
    for _ in requests:
        if not over.acquire(timeout=300.0):
            raise TimeoutError("an answer has not ended within 300 s")
    answers = [request.answers[0].tokens[-count:] for request in requests]
    return Turn(answers, times, sum(request.cached_tokens for request in requests))


class Times:
    """A streamer of `generate`: notes when tokens come; the first call is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left."""


def generated(model: Any, prompts: Prompts, count: int) -> Turn:
    """`generate` of a batch that is padded on the left."""
    longest, streamer = max(map(len, prompts)), Times()
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    sizes = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, streamer=streamer, **sizes)
    return Turn(out[:, longest:].tolist(), [streamer.times[1:]] * len(prompts))


def one_at_a_time(model: Any, prompts: Prompts, count: int) -> Turn:
    turns = [generated(model, [prompt], count) for prompt in prompts]
    return Turn([one.answers[0] for one in turns], [one.times[0] for one in turns])


def batched(model: Any, prompts: Prompts, count: int) -> Turn:
    """transformers' continuous batching, which keeps its cache from turn to turn."""
    greedy = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    pages = sum(map(len, prompts)) // 16 + len(prompts) * (count // 16 + 2)
    on_cpu = {"num_blocks": pages, "max_batch_tokens": 512, "page_size": 16}
    config = ContinuousBatchingConfig(**(on_cpu if model.device.type == "cpu" else {}))
    begun = time.perf_counter() - time.time(), time.perf_counter() - time.monotonic()
    out = model.generate_batch(
        prompts, greedy, config, record_timestamps=True, persistent_manager=True
    )
    done = list(out.values())
    first = done[0].timestamps[0]
    offset = begun[0] if first > 1e9 else 0.0  # by time.time, or by time.perf_counter
    times = [[at + offset for at in one.timestamps] for one in done]
    return Turn([one.generated_tokens for one in done], times)


def measure(backend: str, quick: bool) -> Results:
    """The device, and a row for every way, with shared system prompts and without; each way warms
    up on other prompts."""
    work = WORK[backend, quick]
    if backend == "cuda":
        from examples.local_model import SIZES, build_model

        model, tokenizer = build_model(SIZES["1b"], "bf16", 8192), NoText()
        source = torch.randint(1, 128256, (2**18,)).tolist()
    else:
        from examples.serve.launch import load

        model, tokenizer, _ = load(None)
        source = tokenizer((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))["input_ids"]
    small = Work(work.chats, 40, 8, 4) if backend == "cpu" else work
    warm = source[::-1]
    rows = []
    with engine(model, tokenizer, work, backend) as way:
        way([warm[: small.system + i] for i in range(small.chats)], small.answer)
        for group in (4, 1):
            rows.append({"way": "attnd", "group": group} | replay(way, work, source, group))
            print(summary(rows[-1]), flush=True)
            source = source[1:]  # the next replay finds nothing cached
    source = [*warm[::-1]]
    model.set_attn_implementation("sdpa")
    others: dict[str, Any] = {"generate_batch": batched}
    if backend == "cpu":
        others |= {"generate, one at a time": one_at_a_time, "generate, padded": generated}
    for name, other in others.items():
        scale = 4 if other is one_at_a_time else 1
        other(model, [warm[: small.system + i] for i in range(small.chats // scale)], small.answer)
        for shift, group in enumerate((4, 1)):
            found = replay(
                lambda prompts, count, other=other: other(model, prompts, count),  # type: ignore[misc]
                replace(work, chats=work.chats // scale),
                source[shift:],
                group,
            )
            attention = {"attention": model.config._attn_implementation}
            rows.append({"way": name, "group": group} | attention | found)
            print(summary(rows[-1]), flush=True)
    for row in rows:
        expected = next(one for one in rows if one["group"] == row["group"])["tokens"]
        pairs = zip(row["tokens"], expected, strict=False)
        row["equal_answers"] = sum(one == other for one, other in pairs)
    for row in rows:
        del row["tokens"]
    device = torch.cuda.get_device_name() if backend == "cuda" else "CPU"
    return {"device": device, "rows": rows}


def summary(row: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in row.items() if key != "tokens"})


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=Path, help="only measure, and write device and rows there")
    chosen = parser.parse_args()
    if chosen.rows:
        chosen.rows.write_text(json.dumps(measure(chosen.backend, chosen.quick)), encoding="utf-8")
        return
    with TemporaryDirectory(prefix="attnd-serving-") as folder:
        out = Path(folder, "rows.json")  # of a process of its own, which ends all that it started
        words = ["-m", "bench.serving", "--backend", chosen.backend, "--rows", str(out)]
        words += ["--quick"] * chosen.quick
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        measured = json.loads(out.read_text(encoding="utf-8"))
    work = WORK[chosen.backend, chosen.quick]
    fields = {name: getattr(work, name) for name in Work.__dataclass_fields__}
    results: Results = provenance(PACKAGES) | {"work": fields} | measured
    publish(results, table(results), RESULTS / f"serving-{chosen.backend}.json", chosen)


if __name__ == "__main__":
    main()
