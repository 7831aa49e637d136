"""Tokens a second of a transformers model served by attnd: `python -m bench.model`.

`generate()` of a Llama of 1.2 B parameters with random weights in bf16, 32 prompts of about 2k
tokens, with and without 8k tokens before them that all share, under MPS on the engine's GPU and on
another one; beside what transformers has itself in the same run. The runs are those of
examples/transformers_generate.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.driver.servers import ROOT
from bench.provenance import RESULTS, provenance, write_results
from bench.road import NAMES, placed
from bench.steps import short
from bench.tables import measured

RUNS: Final = {
    "mps": ("mps", 0, "eager,sdpa,static"),
    "other_gpu": ("other_gpu", 0, "sdpa,static"),
    "mps_shared": ("mps", 8192, "sdpa,static"),
    "other_gpu_shared": ("other_gpu", 8192, "sdpa,static"),
}
"""Where the model is, tokens that its prompts share, and what is timed beside: eager attention has
no room for the scores of 10k tokens."""
EXAMPLE: Final = ROOT / "examples" / "transformers_generate.py"
OPTIONS: Final = ("--backend", "cuda", "--dtype", "bf16", "--size", "1b")
PACKAGES: Final = ("attnd", "attnd-client", "torch", "transformers")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One of RUNS; what it prints goes to this process's own output."""
    place, shared, beside = RUNS[name]
    began = time.monotonic()
    with placed(place) as gpu, TemporaryDirectory(prefix="attnd-model-") as directory:
        out = Path(directory, "times.json")
        asked = ["--shared", str(shared), "--beside", beside, "--rounds", str(rounds)]
        placing = ["--gpu", str(gpu), "--out", str(out)]
        subprocess.run([sys.executable, str(EXAMPLE), *OPTIONS, *asked, *placing], check=True)
        ways = json.loads(out.read_text(encoding="utf-8"))
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return {"name": name, "place": place, "shared": shared, "rounds": rounds, "ways": ways}


def table(results: Mapping[str, Any]) -> str:
    """Tokens a second of every way at every place, beside the best of transformers' own."""
    lines = [
        "| model's place | shared tokens | way | tokens/s, prefill left out | beside transformers' "
        "fastest | with the prefill | beside the fastest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        ways = row["ways"]
        own = [speed for name, speed in ways.items() if not name.startswith("attnd")]
        best = {rate: max(speed[rate] for speed in own) for rate in ("decode", "whole")}
        for name, speed in ways.items():
            if name == "attnd, prefix shared" and not row["shared"]:
                continue  # the same as without
            label = name if row["shared"] else name.replace(" shared,", "")
            cells = [
                f"{speed[rate]:.0f} | {speed[rate] / best[rate]:.2f} x"
                for rate in ("decode", "whole")
            ]
            where = NAMES[row["place"]]
            lines.append(f"| {where} | {row['shared']} | {label} | {' | '.join(cells)} |")
    told = (
        measured(results)[:-1] + "; a Llama of 1.2 B "
        "parameters with random weights in bf16, 32 prompts of about 2k tokens after the shared "
        "ones, 64 new tokens each."
    )
    return "\n".join([*lines, "", told])


def device_name() -> str:
    """Of the first GPU, asked by a process of its own: this one opens no device."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run(
        [sys.executable, "-c", ask], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results = provenance(PACKAGES) | {"device": device_name(), "rows": []}
    path = asked.out or RESULTS / f"model-{short(results['device'])}.json"
    for name in asked.runs.split(","):
        results["rows"].append(measure(name, asked.rounds))
        write_results(path, results)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
