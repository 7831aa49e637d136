"""What a router costs: calls a second through one ingress process, and what it adds to one call.

    python -m bench.routing [--seconds 5] [--callers 16] [--tcp] [--json FILE]
    python -m bench.routing --ranks [--seconds 20]    # real engines: bench/epochs.py

The engines are stand-ins that answer `get_sequence` and `decode` with what lies ready, in one
process beside the measured one, so that it is the ingress that is at its limit. Calls are made in
the ingress's process, as its HTTP door makes them: the way from there to the engine and back. The
same calls through a plain `Link` to one engine are measured in turn with them; what is added is the
difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.epochs import epochs
from config.settings import load_settings
from service.cluster.membership.members_file import Listed, write_members
from service.cluster.routing.router import Router
from service.cluster.routing.tags import made_id
from service.doors.kit.link import Link
from service.doors.kit.upstream import Upstream
from service.image.json_text import dump_json
from service.image.reading import REQUEST
from service.image.writing import image
from service.operations.table import BY_NAME
from service.tenants import OPEN

SECRET: Final = "0" * 32
HEADS: Final = 8
DIM: Final = 128
SIZES: Final = {"get_sequence": 0, "8 KiB": 4, "64 KiB": 32, "1 MiB": 512}
"""Bytes of q by the number of its rows, in fp16 with 8 heads of 128."""
SETTINGS: Final = load_settings(["--log.level", "warning"]).server


class Calls:
    """One operation, ready to be called again and again."""

    def __init__(self, upstream: Upstream, name: str, rows: int, ids: list[str]) -> None:
        self.upstream = upstream
        self.operation = BY_NAME["decode" if rows else "get_sequence"]
        if rows:
            q = np.zeros((rows, HEADS, DIM), np.float16)
            fields: dict[str, Any] = {"layer": 0, "sequences": ids[:rows]}
            self.parts = image(REQUEST, dump_json(fields), {"q": q})
        else:
            self.parts = image(REQUEST, dump_json({"id": ids[0]}), {})

    async def one(self) -> float:
        """Seconds of one call, the body's way into its slot not counted."""
        upstream = self.upstream
        slot, length = await upstream.lay(self.parts)
        started = time.perf_counter()
        answered, place = await upstream.call(
            self.operation, slot, length, 2**26, 0, bytes(16), OPEN
        )
        spent = time.perf_counter() - started
        assert answered.status == 200, bytes(answered.image)[:400]
        upstream.give_back(place)
        upstream.give_back(slot)
        return spent

    async def many(self, seconds: float, callers: int) -> tuple[float, float]:
        """Calls a second, by so many callers that wait for their answers, and the processor time of
        one, which does not depend on who else uses the machine."""
        cpu = time.process_time()
        ends = time.perf_counter() + seconds
        done = 0

        async def call() -> None:
            nonlocal done
            while time.perf_counter() < ends:
                await self.one()
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        return done / (time.perf_counter() - started), (time.process_time() - cpu) / done


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start stand-ins, and measure both ways in."""
    engines = [start_engine(folder / f"{n}.sock", given.tcp) for n in range(2)]
    try:
        addresses = [await asyncio.to_thread(address_of, one) for one in engines]
        members = [Listed(f"engine-{n}", one) for n, one in enumerate(addresses)]
        write_members(folder / "members", members)
        router, link = Router(SETTINGS), Link(SETTINGS)
        await router.connect(str(folder / "members"), "bench", SECRET)
        await link.connect(addresses[0], "bench", SECRET)
        while len(router.members.engines) < 2:
            await asyncio.sleep(0.05)
        tags = {one.name: one.tag for one in router.members.engines}
        rows = []
        for name, count in SIZES.items():
            own = [made_id(tags["engine-0"]) for _ in range(max(count, 1))]
            spread = [made_id(tags[f"engine-{n % 2}"]) for n in range(max(count, 1))]
            ways = {
                "link": Calls(link, name, count, own),
                "router": Calls(router, name, count, own),
            }
            if count:
                ways["split over two"] = Calls(router, name, count, spread)
            row: dict[str, Any] = {"call": name}
            spent: dict[str, list[float]] = {way: [] for way in ways}
            ends = time.perf_counter() + given.seconds
            while time.perf_counter() < ends:
                for way, calls in ways.items():  # in turn, so that all have the same weather
                    spent[way].append(await calls.one())
            for way, times in spent.items():
                row[f"{way} p50 ms"] = round(1e3 * statistics.median(times), 4)
            row["added p50 ms"] = round(row["router p50 ms"] - row["link p50 ms"], 4)
            for way, calls in ways.items():
                rate, cpu = await calls.many(given.seconds, given.callers)
                row[f"{way} calls/s"] = round(rate)
                row[f"{way} CPU us"] = round(1e6 * cpu)
            rows.append(row)
            print(json.dumps(row))
        router.close()
        link.close()
        return {
            "command": " ".join(["python -m bench.routing", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


def start_engine(path: Path, over_tcp: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.standing_engine", str(path), SECRET]
    if over_tcp:
        command.append("--tcp")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def address_of(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--tcp", action="store_true", help="engines as on other hosts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", action="store_true", help="what ranks and epochs cost")
    given = parser.parse_args()
    if given.ranks:
        for row in epochs(given.seconds):
            print(json.dumps(row))
        return
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        told = uvloop.run(measure(given, Path(folder)))
    if given.json is not None:
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
