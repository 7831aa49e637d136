"""The engines of a cluster by their addresses, in a file for the router, which the supervisor or
Ray's replica writes. The supervisor imports this: no heavy library."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One engine: its address, and whether it is leaving, and gets no new sequences."""

    name: str
    address: str
    is_leaving: bool = False


def read_roster(path: Path) -> list[RosterEntry]:
    return [RosterEntry(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def write_roster(path: Path, entries: Collection[RosterEntry]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps([asdict(one) for one in entries]), encoding="utf-8")
    os.replace(fresh, path)


def engine_name(number: int) -> str:
    return f"engine-{number}"


def list_engines(path: Path, sockets: Sequence[Path]) -> None:
    """Writes the roster of engines of this host."""
    named = enumerate(sockets)
    write_roster(path, [RosterEntry(engine_name(number), str(one)) for number, one in named])
