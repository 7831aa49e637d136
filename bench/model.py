"""Tokens a second of a transformers model on attnd: `python -m bench.model`.

`generate()` of a Llama of 1.2 B parameters with random weights in bf16, of 32 prompts of about 2k
tokens, with and without a common prefix of 8k tokens, under MPS on the engine's GPU and on another
one, beside transformers' own attention in the same run. Each run is one of
examples/transformers_generate.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.gpu_steps import PLACES, placed
from bench.report.provenance import (
    RESULTS,
    ROOT,
    Results,
    command_line,
    device_name,
    provenance,
    publish,
)
from bench.report.tables import markdown, with_stamp

RUNS: Final = {
    "mps": ("mps", 0, "eager,sdpa,static"),
    "other_gpu": ("other_gpu", 0, "sdpa,static"),
    "mps_shared": ("mps", 8192, "sdpa,static"),
    "other_gpu_shared": ("other_gpu", 8192, "sdpa,static"),
}
"""The model's place, its prompts' common tokens, and transformers' ways: the scores of 10k tokens
do not fit for eager attention."""
EXAMPLE: Final = ROOT / "examples" / "transformers_generate.py"
OPTIONS: Final = ("--backend", "cuda", "--dtype", "bf16", "--size", "1b")
PACKAGES: Final = ("attnd", "attnd-client", "torch", "transformers")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One of RUNS; its output goes to the terminal."""
    place, shared, beside = RUNS[name]
    began = time.monotonic()
    with placed(place) as gpu, TemporaryDirectory(prefix="attnd-model-") as directory:
        out = Path(directory, "times.json")
        options = ["--shared", str(shared), "--beside", beside, "--rounds", str(rounds)]
        placing = ["--gpu", str(gpu), "--out", str(out)]
        subprocess.run([sys.executable, str(EXAMPLE), *OPTIONS, *options, *placing], check=True)
        ways = json.loads(out.read_text(encoding="utf-8"))
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return {"name": name, "place": place, "shared": shared, "rounds": rounds, "ways": ways}


def table(results: Results) -> str:
    """Tokens a second of every way at every place, beside the best of transformers' own."""
    rows = []
    for row in results["rows"]:
        ways = row["ways"]
        own = [speed for name, speed in ways.items() if not name.startswith("attnd")]
        best = {rate: max(speed[rate] for speed in own) for rate in ("decode", "whole")}
        for name, speed in ways.items():
            if name == "attnd, prefix shared" and not row["shared"]:
                continue  # the same as without
            label = name if row["shared"] else name.replace(" shared,", "")
            cells = [PLACES[row["place"]], str(row["shared"]), label]
            for rate in ("decode", "whole"):
                cells += [f"{speed[rate]:.0f}", f"{speed[rate] / best[rate]:.2f} x"]
            rows.append(cells)
    head = ["model's place", "shared tokens", "way", "decode tokens/s", "ratio"]
    head += ["with the prefill", "ratio"]
    note = (
        "ratio: to transformers' fastest way; a Llama of 1.2 B parameters with random "
        "weights in bf16, 32 prompts of about 2k tokens after the shared ones, 64 new tokens each"
    )
    return with_stamp(markdown(head, rows), results, note)


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    if unknown := set(chosen.runs.split(",")) - RUNS.keys():
        parser.error(f"--runs {unknown.pop()}: there are {', '.join(RUNS)}")
    # a process of its own asks for the name, because this one must not open a device
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    device = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    results: Results = provenance(PACKAGES) | {"device": device, "rows": []}
    for name in chosen.runs.split(","):
        results["rows"].append(measure(name, 1 if chosen.quick else chosen.rounds))
    publish(results, table(results), RESULTS / f"model-{device_name(device)}.json", chosen)


if __name__ == "__main__":
    main()
