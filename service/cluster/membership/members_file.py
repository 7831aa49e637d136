"""The file of members: which engines a cluster has, written by whoever starts and stops them and
read by the doors. It is replaced whole, so that a reader sees all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from config.cluster import ClusterSettings


@dataclass(frozen=True, slots=True)
class Listed:
    """One engine: where it listens, for how long it may be out of reach before its sequences count
    as lost (on the same host a broken session is a dead engine), and whether it is to be removed
    and takes nothing new."""

    name: str
    address: str
    lost_after_s: float = 0.0
    is_leaving: bool = False


def read_members(path: Path) -> list[Listed]:
    return [Listed(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def write_members(path: Path, members: Collection[Listed]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps([asdict(one) for one in members]), encoding="utf-8")
    os.replace(fresh, path)


def engine_name(number: int) -> str:
    return f"engine-{number}"


def list_members(path: Path, sockets: Sequence[Path], cluster: ClusterSettings) -> None:
    """Write the file for engines of this host and of others, which go by their addresses."""
    here = [Listed(engine_name(number), str(one)) for number, one in enumerate(sockets)]
    there = [Listed(address, address, cluster.lost_after_s) for address in cluster.members]
    write_members(path, [*here, *there])
