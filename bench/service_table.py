"""The results of bench/service.py as Markdown, and how they stand to what they must reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.tables import measured

COSTS: Final = {
    "session_in_place": "Session, in place",
    "session": "Session",
    "road": "frames",
    "road_echo": "echo of frames",
    "client": "Client",
    "http": "raw HTTP",
    "http_echo": "bare ASGI echo",
}
INFERENCE: Final = {
    "oip_http": "OIP over HTTP",
    "oip_regions": "the same, in regions",
    "oip_grpc": "OIP over gRPC",
}
"""Ways that not all results have; `oip_regions` was measured up to 0.2."""
RATES: Final = {"session": "Session", "client": "Client", "http": "raw HTTP"}
LEAST_RATIO: Final = 1.5
RATIO_BYTES: Final = range(65536, 1048576 + 1)
"""Sizes of q whose requests a second are held against the version before."""


def table(results: Mapping[str, Any]) -> str:
    """What each way in costs, how many requests it carries, and how both were measured."""
    rows = results["rows"]
    return "\n".join([*costs(rows), "", *rates(rows, results["connections"]), "", told(results)])


def costs(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Medians beyond the backend's own time."""
    shown = COSTS | {name: words for name, words in INFERENCE.items() if name in rows[0]["ways"]}
    yield head("B", "q", "backend ms", *(f"{name} ms" for name in shown.values()))
    for row in rows:
        ways = row["ways"]
        cells = [f"{ways[name]['cost_p50_ms']:.3f}" for name in shown]
        yield cut(*case(row), f"{ways['road']['backend_p50_ms']:.3f}", *cells)


def rates(rows: list[dict[str, Any]], connections: int) -> Iterator[str]:
    """99th percentiles, and requests a second on several connections."""
    p99 = [f"{name} p99 ms" for name in RATES.values()]
    per_s = [f"{name} req/s, {connections}" for name in RATES.values()]
    has_before = any("before_http" in row["ways"] for row in rows)
    before = ["HTTP before", "Client before"] if has_before else []
    yield head("B", "q", *p99, *per_s, *before)
    for row in rows:
        ways = row["ways"]
        cells = [f"{ways[name]['p99_ms']:.1f}" for name in RATES]
        cells += [f"{ways[name]['crowd_per_s']:,.0f}" for name in RATES]
        if has_before:
            cells += [beside_before(row, name) for name in ("http", "client")]
        yield cut(*case(row), *cells)


def beside_before(row: Mapping[str, Any], name: str) -> str:
    """Requests a second of the version before; "-" where it had no turn."""
    before = row["ways"].get(f"before_{name}")
    if before is None:
        return "-"
    return f"{before['crowd_per_s']:,.0f} (now {ratio(row, name):.2f} times)"


def told(results: Mapping[str, Any]) -> str:
    """Where, when and how."""
    start = results["start"]
    processes = ", ".join(f"{one['name']} {one['pss']:.0f}" for one in start["processes"])
    return (
        measured(results)[:-1] + "; kv_len "
        f"{results['kv_len']}, fp16, one layer. Medians beyond the backend's own time, which "
        f"stands beside them. Start to ready {start['ready_s']:.1f} s ({start['imports_s']:.1f} s "
        f"of it the engine's imports), idle {start['pss_mib']:.0f} MiB with the default pool "
        f"({processes})."
    )


def case(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["batch"]), f"{row['q_bytes'] // 1024} KiB"


def head(*cells: str) -> str:
    return f"{cut(*cells)}\n{'|---' * len(cells)}|"


def cut(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def ratio(row: Mapping[str, Any], name: str) -> float:
    """Requests a second of now, of those before."""
    ways = row["ways"]
    return float(ways[name]["crowd_per_s"] / ways[f"before_{name}"]["crowd_per_s"])


def reached(results: Mapping[str, Any]) -> str:
    """Each figure that is required, beside what it must be."""
    rows, start = results["rows"], results["start"]
    lines = []

    def say(what: str, found: float, most: float, unit: str) -> None:
        verdict = "reached" if found <= most else "SHORT"
        lines.append(f"{verdict:8} {what}: {found:,.3g} {unit}, at most {most:g}")

    for row in rows:
        here = f"B {row['batch']}, {row['q_bytes'] // 1024} KiB"
        if row["q_bytes"] == 8192:
            session = row["ways"]["session"]["cost_p50_ms"] * 1e3
            say(f"Session beyond the backend, {here}", session, 150, "us")
            say(f"HTTP beyond echo and backend, {here}", row["added_us"]["http"], 300, "us")
        say(f"Client beyond raw HTTP, {here}", row["added_us"]["client"], 150, "us")
        if "before_http" in row["ways"] and row["q_bytes"] in RATIO_BYTES:
            found = ratio(row, "http")
            verdict = "reached" if found >= LEAST_RATIO else "SHORT"
            lines.append(
                f"{verdict:8} HTTP requests/s beside before, {here}: {found:.2f} times, "
                f"at least {LEAST_RATIO}; Client {ratio(row, 'client'):.2f} times"
            )
    say("start to ready", start["ready_s"], 5, "s")
    say("idle memory of all processes", start["pss_mib"], 600, "MiB")
    return "\n".join(lines)
