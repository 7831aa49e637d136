"""The file that names the engines of a cluster. The supervisor imports this: no heavy library."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from config.cluster import ClusterSettings


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """One engine: its address; for how many seconds it may be unreachable before its sequences
    count as lost (0 on the same host, where its process's exit is seen); whether it is leaving, and
    takes no new sequences."""

    name: str
    address: str
    lost_after_s: float = 0.0
    is_leaving: bool = False


def read_members(path: Path) -> list[MemberEntry]:
    return [MemberEntry(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def write_members(path: Path, members: Collection[MemberEntry]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps([asdict(one) for one in members]), encoding="utf-8")
    os.replace(fresh, path)


def engine_name(number: int) -> str:
    return f"engine-{number}"


def list_members(path: Path, sockets: Sequence[Path], cluster: ClusterSettings) -> None:
    """Writes the file for engines of this host, and of others, named by their addresses."""
    here = [MemberEntry(engine_name(number), str(one)) for number, one in enumerate(sockets)]
    there = [MemberEntry(address, address, cluster.lost_after_s) for address in cluster.members]
    write_members(path, [*here, *there])
