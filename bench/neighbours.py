"""A victim's decodes in one namespace beside the attacks of another one.

    python -m bench.neighbours [--quick] [--only TEXT] [--before DIR] [--out FILE]

The victim decodes one row every 2 ms, over a session or over HTTP. The attacks are in
bench/cases/attacks.py; each runs for a few seconds in its own process, against one engine and
against a cluster of two. The table has the victim's waits and the statuses that the attacker got.
On a quiet machine p99 must be at most 50 ms and the maximum at most 150 ms. Beside attacks on a
service with a disk the victim also commits a page every 50 ms, until two seconds after the attack:
each commit must be durable within a second.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from attnd import Prefix, ServiceError

from bench.cases.attacks import ATTACKS, HEADS, PAGE, Attack, append
from bench.driver.attacker import Door, connected, prepare_attack, run_attack
from bench.driver.processes import children, spent_s
from bench.driver.servers import Server, attnd
from bench.report.provenance import ROOT, command_line, provenance, write_results
from bench.report.tables import markdown, with_stamp
from service.keys import line_of, new_key
from service.tenants import SCOPES

EVERY_S: Final = 0.002
"""Between two decodes of the victim."""
P99_MS: Final = 50.0
MAX_MS: Final = 150.0
COMMIT_EVERY_S: Final = 0.05
COMMIT_MS: Final = 1000.0
AFTER_S: Final = 2.0
"""The victim commits for this time after the attack."""
COMMITTED: Final = 64
"""Pages of a sequence that the victim commits one by one."""
ATTACK_S: Final = 6.0
QUICK_S: Final = 1.5
AHEAD_S: Final = 0.3
"""The victim decodes for this time before and after the attack."""
OVERDUE_S: Final = 60.0
"""An attack that takes this much longer than planned is killed."""
POOL: Final = (*HEADS.pool(num_layers=2), "--pool.num-pages=32768", "--pool.page-size=16")
DISK: Final = ("--cache.disk-bytes=536870912", "--cache.model=bench", "--cache.write=commit")
SPAWN: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Service:
    """A running service with the keys of victim and attacker."""

    name: str
    server: Server
    victim_key: str
    attacker_key: str

    def door(self, way: str, key: str) -> Door:
        path = self.server.socket if way == "session" else ""
        return Door(way, self.server.url, path, key)


@dataclass(frozen=True, slots=True)
class Waits:
    """The victim's waits beside one attack, in milliseconds, and the attacker's outcome."""

    service: str
    way: str
    attack: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int
    failed: int
    outcome: str
    commit_ms: float | None = None
    """The longest durable commit, or None without a disk."""

    @property
    def holds(self) -> bool:
        """Whether the waits are within a quiet machine's limits."""
        is_durable = self.commit_ms is None or self.commit_ms <= COMMIT_MS
        return self.p99_ms <= P99_MS and self.max_ms <= MAX_MS and is_durable and not self.failed

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        waits = [f"{ms:.1f}" for ms in (self.p50_ms, self.p99_ms, self.max_ms)]
        mark = "" if self.holds else " **over**"
        commit = "" if self.commit_ms is None else f"{self.commit_ms:.0f}"
        ended = waits[2] + mark, commit, self.outcome
        return self.service, self.way, self.attack, *waits[:2], *ended


WAITS: Final = ("victim p50 ms", "p99 ms", "max ms", "longest commit ms")
HEAD: Final = ("service", "way", "attack", *WAITS, "the attacker got")


def main() -> None:
    parser = command_line(__doc__ or "", before=True)
    parser.add_argument("--only", default="", help="attacks whose name contains this text")
    chosen = parser.parse_args()
    attacks = [one for one in ATTACKS if chosen.only in one.name]
    if not attacks:
        parser.error(f"no attack has {chosen.only!r} in its name")
    rows = []
    for row in measure(attacks, QUICK_S if chosen.quick else ATTACK_S, chosen.before or ROOT):
        print(*row.cells(), sep=", ", flush=True)
        rows.append(row)
    results = provenance(("attnd", "uvicorn", "torch", "numpy"))
    print(f"\n{with_stamp(markdown(HEAD, [row.cells() for row in rows]), results)}")
    if chosen.out:
        write_results(chosen.out, results | {"rows": [asdict(row) for row in rows]})


def measure(attacks: Sequence[Attack], seconds: float, root: Path = ROOT) -> Iterator[Waits]:
    """A row for each attack and each way on one engine, then over HTTP on a cluster of two."""
    ways = (("one engine", ("session", "http")), ("cluster of two", ("http",)))
    for name, service_ways in ways:
        rows = [
            (attack, way) for attack in attacks for way in service_ways if attack.runs(name, way)
        ]
        shared = [(attack, way) for attack, way in rows if not attack.is_apart]
        if shared:
            with running(name, root) as service:
                for attack, way in shared:
                    yield beside(service, way, attack, seconds)
        for attack, way in rows:
            if attack.is_apart:
                with running(name, root, attack) as service:
                    yield beside(service, way, attack, seconds)


@contextmanager
def running(name: str, root: Path, attack: Attack | None = None) -> Iterator[Service]:
    """A service with keys for two namespaces, as an attack needs it."""
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="attnd-neighbours-"))
        keys = {space: new_key() for space in ("victim", "attacker")}
        file = Path(directory, "keys")
        lines = [line_of(keys["victim"], "victim", ("read", "append"))]
        lines.append(line_of(keys["attacker"], "attacker", SCOPES))
        file.write_text("\n".join(lines) + "\n")
        options = [*POOL, "--auth.keys-file", str(file)]
        if name != "one engine":
            options += ["--cluster.engines", "2"]
        reads_log = attack is None or not attack.reads_no_log
        if attack is not None and attack.has_disk:
            options += [*DISK, f"--cache.disk-path={directory}/disk"]
        if attack is not None and attack.restarts:
            with attnd(*options, root=root) as server:
                prepare_attack(attack, Door("session", "", server.socket, keys["attacker"]))
        server = stack.enter_context(attnd(*options, root=root, reads_log=reads_log))
        yield Service(name, server, keys["victim"], keys["attacker"])


def beside(service: Service, way: str, attack: Attack, seconds: float) -> Waits:
    """The victim's waits while an attack runs."""
    (outcomes, attacker), (waits, victim) = SPAWN.Pipe(), SPAWN.Pipe()
    door = service.door(way, service.attacker_key)
    attacking = SPAWN.Process(target=attack_for, args=(attack.name, door, seconds, attacker))
    mine = service.door(way, service.victim_key)
    decoding = SPAWN.Process(target=decode_for, args=(mine, victim))
    (commits, committer), committing = SPAWN.Pipe(), None
    if attack.has_disk:
        committing = SPAWN.Process(target=commit_for, args=(mine, committer))
    processes = [one for one in (attacking, decoding, committing) if one is not None]
    for process in processes:
        process.start()
    try:
        wait_for(outcomes, attacking, "prepared")
        wait_for(waits, decoding, "warm")
        waits.send("begin")
        if committing is not None:
            wait_for(commits, committing, "warm")
            commits.send("begin")
        other = least_busy(children(service.server)["engine"])
        if attack.stops_engine:
            os.kill(other, signal.SIGSTOP)
        outcomes.send("begin")
        statuses = {"killed": 1}
        if outcomes.poll(seconds + OVERDUE_S):
            statuses = outcomes.recv()
        else:
            attacking.kill()
        time.sleep(AHEAD_S)
        measured, failed = end_of(waits)
        commit_ms = None
        if committing is not None:
            time.sleep(AFTER_S - AHEAD_S)
            longest, lost = end_of(commits)
            commit_ms, failed = round(max(longest) * 1e3, 2), failed + lost
    finally:
        for process in processes:
            process.kill()
            process.join()
    p50, p99 = np.percentile(measured, (50, 99)) * 1e3
    return Waits(
        service.name,
        way,
        attack.name,
        round(float(p50), 2),
        round(float(p99), 2),
        round(max(measured) * 1e3, 2),
        len(measured),
        failed,
        ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())) or "nothing",
        commit_ms,
    )


def end_of(pipe: Any) -> tuple[list[float], int]:
    """End a victim's process: the seconds of its calls, and how many failed."""
    pipe.send("end")
    ended: tuple[list[float], int] = ([OVERDUE_S], 1)
    if pipe.poll(OVERDUE_S):
        ended = pipe.recv()
    return ended


def least_busy(engines: Sequence[int]) -> int:
    """The process of an engine that the victim's sequence is not on, after `AHEAD_S`."""
    before = {pid: spent_s([pid]) for pid in engines}
    time.sleep(AHEAD_S)
    return min(engines, key=lambda pid: spent_s([pid]) - before[pid])


def wait_for(pipe: Any, process: Any, word: str) -> None:
    """Wait for a word from a process; RuntimeError if it ends first or sends another one."""
    while not pipe.poll(0.1):
        if not process.is_alive():
            raise RuntimeError(f"a process ended with {process.exitcode} before it was {word}")
    if (received := pipe.recv()) != word:
        raise RuntimeError(f"a process sent {received!r}, expected {word!r}")


def attack_for(name: str, door: Door, seconds: float, pipe: Any) -> None:
    """The attacker's process."""
    (attack,) = (one for one in ATTACKS if one.name == name)
    run_attack(attack, door, seconds, pipe)


def decode_for(door: Door, pipe: Any) -> None:
    """The victim's process: decodes one row until the pipe says stop, then sends their seconds.

    Without retries, so that a refused call counts as failed.
    """
    with connected(door, timeout=OVERDUE_S, retries=0) as client:
        name = client.create_sequence().id
        append(client, name, 64)
        q = np.ones((1, HEADS.num_qo, HEADS.dim), np.float16)
        for _ in range(50):
            client.decode(0, [name], q)
        time_calls(pipe, lambda: client.decode(0, [name], q), EVERY_S)


def commit_for(door: Door, pipe: Any) -> None:
    """The victim's second process: commits one page after the other, each of which must be durable,
    until the pipe says stop, then sends their seconds."""
    with connected(door, timeout=OVERDUE_S, retries=0) as client:
        numbers = itertools.count()
        name, tokens = "", np.empty(0, np.uint32)

        def commit() -> None:
            nonlocal name, tokens
            number = next(numbers)
            if not number % COMMITTED:
                name, tokens = client.create_sequence().id, np.empty(0, np.uint32)
            tokens = np.append(tokens, np.full(PAGE, number, np.uint32))
            append(client, name, PAGE)
            if not client.commit(name, Prefix(tokens)).durable:
                raise ServiceError("a commit is not durable")

        commit()
        time_calls(pipe, commit, COMMIT_EVERY_S)


def time_calls(pipe: Any, call: Callable[[], object], every_s: float) -> None:
    """Call again and again until the pipe says stop, then send the seconds and the failures."""
    pipe.send("warm")
    pipe.recv()
    seconds, failed = [], 0
    while not pipe.poll():
        started = time.perf_counter()
        try:
            call()
        except (ServiceError, OSError):
            failed += 1
        seconds.append(time.perf_counter() - started)
        time.sleep(every_s)
    pipe.send((seconds, failed))


if __name__ == "__main__":
    main()
