"""The table of the serving engine's results, which `bench.serving` measures."""

from __future__ import annotations

from typing import Final

from bench.report.provenance import RESULTS, Results
from bench.report.tables import markdown, with_stamp

SERVING_RESULTS: Final = RESULTS / "serving-cpu.json"


def table(results: Results) -> str:
    rows = []
    for row in results["rows"]:
        attnd = next(one for one in results["rows"] if one["group"] == row["group"])
        first, between = ([f"{ms:.0f}" for ms in row[key]] for key in ("first_ms", "between_ms"))
        hit = "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        ratio = f"{attnd['tokens_s'] / row['tokens_s']:.2f} x"
        shared = f"by {row['group']}" if row["group"] > 1 else "no"
        cells = [shared, row["way"], f"{row['tokens_s']:.1f}", ratio]
        rows.append([*cells, *first, *between, hit])
    head = ["shared", "way", "tokens/s", "attnd's is", "first p50", "first p99"]
    head += ["next p50", "next p99", "hits"]
    work = results["work"]
    note = (
        "system prompts shared by that many conversations; ms to the first token and to each next "
        "one; hits: rate of cached tokens; "
        f"{work['chats']} conversations of two turns; a system prompt has {work['system']} tokens, "
        f"a question {work['question']}, an answer {work['answer']}"
    )
    used = sorted({row["attention"] for row in results["rows"] if "attention" in row})
    if used:
        note += f"; transformers' attention: {', '.join(used)}"
    return with_stamp(markdown(head, rows), results, note)
