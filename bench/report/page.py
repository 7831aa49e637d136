"""Writes bench/RESULTS.md and the pictures beside the results: `python -m bench.report`.

Every table of bench/RESULTS.md comes from a file in bench/results. `--no-pictures` needs no
matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import cache, cluster, core, gpu_steps, gpu_tiers, model, service, tiers
from bench.report.engine_results import ENGINE_RESULTS
from bench.report.engine_results import table as engine_table
from bench.report.kernel_results import H100_RESULTS, KERNEL_RESULTS, kernels_table
from bench.report.provenance import RESULTS, Results, read_results
from bench.report.serving_results import SERVING_RESULTS
from bench.report.serving_results import table as serving_table
from bench.report.tables import wrapped
from simulation.tables import fleet_table

REPORT: Final = RESULTS.with_name("RESULTS.md")
HEAD: Final = """# Results

Generated from `bench/results` by `python -m bench.report`; do not edit. [README.md](README.md) says
what each benchmark measures and how to run it. The line below a table names the device, the date,
the commit and the command of the measurement. `make bench-stale` lists changes of kernels since.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the report: its question, the command that prints it today, file and renderer."""

    title: str
    command: str
    text: str
    file: Path
    render: Callable[[Results], str]
    picture: str = ""

    def markdown(self) -> str:
        """The section with its table; the commit of the file is that of all its parts."""
        parts = [f"## {self.title}", f"`{self.command}`. {self.text}"]
        if self.picture:
            parts.append(self.picture)
        return "\n\n".join([*parts, self.render(read_results(self.file))])


def svg(name: str, alt: str) -> str:
    return f"![{alt}](results/pictures/{name}.svg)"


SECTIONS: Final = (
    Section(
        "Ways into the service",
        "python -m bench.service",
        "Milliseconds of a decode on the CPU backend beyond the backend's own time, by each way "
        'in, and of a bare HTTP echo. "In place": arrays from `session.empty`. '
        '"Before": the single-process service that this one replaced. The machine had eight idle '
        "cores; on two cores shared by caller, door and engine, times are 1.5 to 2 times as long.",
        RESULTS / "service-cpu.json",
        service.table,
    ),
    Section(
        "A decode step on a GPU from host memory",
        "python -m bench.service --backend cuda",
        "Layer by layer from host memory and back, by each way in, beside the same kernels alone "
        "and the backend in one process.",
        RESULTS / "service-h200.json",
        gpu_steps.table,
    ),
    Section(
        "A decode step that stays on the GPU",
        "python -m bench.service --backend cuda",
        "The same step by `attnd.torch.TorchSession`, by the place of the calling process.",
        RESULTS / "road-h200.json",
        gpu_steps.placed_table,
    ),
    Section(
        "A transformers model",
        "python -m bench.model",
        "Tokens a second of `generate()`, beside transformers' own attention and caches in the "
        'same run. "Graphs": the model\'s decode step is recorded as one CUDA graph.',
        RESULTS / "model-h200.json",
        model.table,
    ),
    Section(
        "A serving engine on the CPU",
        "python -m bench.serving",
        "Conversations with SmolLM2-135M-Instruct by the engine of `examples/serve`, whose KV is "
        "in attnd, beside transformers' continuous batching (`generate_batch`) and `generate` in "
        "the same run, all on two cores. All conversations arrive at once.",
        SERVING_RESULTS,
        serving_table,
        svg("serving-cpu", "Tokens a second and the first token's wait, by way of serving"),
    ),
    Section(
        "A serving engine on a GPU",
        "python -m bench.serving --backend cuda",
        "The same with a Llama of 1.2 B parameters with random weights, in bf16, on one GPU. "
        "`generate_batch` takes flash-attn where it is installed: here it was not.",
        SERVING_RESULTS.with_stem("serving-cuda"),
        serving_table,
        svg("serving-cuda", "Tokens a second and the first token's wait, by way of serving"),
    ),
    Section(
        "A whole vLLM over its own tier and over attnd",
        "python -m bench.engines --python VENV/bin/python",
        "Four prompts are answered, vLLM's caches are emptied, and the prompts are answered again "
        "from the tier below: vLLM's own `fs` tier, or attnd ([engines](../docs/engines.md)).",
        ENGINE_RESULTS,
        engine_table,
        svg("engines-cpu", "Prompts with the same tokens, and tokens computed"),
    ),
    Section(
        "The prefix cache on a published trace",
        "python -m bench.cache --trace FILE",
        "Token hit rate by pool size, and the CPU time of each operation.",
        RESULTS / "cache-cpu.json",
        cache.table,
    ),
    Section(
        "Tiers on a published trace",
        "python -m bench.tiers --trace FILE",
        "Token hit rate of the pool alone, with host memory and with a disk behind it; then moves "
        "of 2 MiB pages on the CPU, by one thread.",
        RESULTS / "tiers-cpu.json",
        tiers.table,
    ),
    Section(
        "Tiers on a GPU",
        "python -m bench.tiers --backend cuda",
        "256 pages to host memory and back, from the lookup to the commit, beside bare copies of "
        "64 MiB pinned pieces; small decodes beside a client that has prompts loaded one after "
        "another; a cached prompt of 8k tokens. Without digests the device computes none and "
        "nothing is verified.",
        RESULTS / "tiers-h200.json",
        gpu_tiers.table,
    ),
    Section(
        "A cluster on a published trace",
        "python -m bench.cluster --trace FILE",
        "The same requests on one service, on two with a perfect split, and on a cluster of two.",
        RESULTS / "cluster-cpu.json",
        cluster.table,
    ),
    Section(
        "Thousands of engines, simulated",
        "python -m simulation --trace FILE",
        "[docs/simulation.md](../docs/simulation.md) lists the assumptions, and compares the "
        "simulation with measurements.",
        RESULTS / "simulation.json",
        fleet_table,
    ),
    Section(
        "The core",
        "python -m bench.core",
        "The CPU's share of every step: pages, forks, plans.",
        RESULTS / "core.json",
        core.table,
    ),
    Section(
        "CUDA kernels",
        "python -m bench.kernels",
        "On an H200, beside FlashInfer 0.7.4 on the same kind of machine, and on an H100, whose "
        'memory is a third slower. "Roofline" is the fraction of the machine\'s ceiling that a '
        'workload reaches, "at least" what it must reach on an H200.',
        KERNEL_RESULTS,
        lambda results: kernels_table(results, read_results(H100_RESULTS)),
        svg("h200", "Roofline fraction of every workload, beside FlashInfer's"),
    ),
)


def report() -> str:
    """The text of bench/RESULTS.md."""
    text = "\n\n".join([HEAD.rstrip(), *(section.markdown() for section in SECTIONS)])
    return wrapped(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-pictures", action="store_true", help="write only the tables")
    chosen = parser.parse_args()
    REPORT.write_text(report(), encoding="utf-8")
    print(f"wrote {REPORT}")
    if not chosen.no_pictures:
        from bench.report.pictures import draw_all

        draw_all()
