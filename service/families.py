"""The families of metrics: of each its type, labels, unit and meaning, and the question that it
answers. docs/metrics.md is made from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
ROWS: Final = tuple(float(4**power) for power in range(9))
STAGES: Final = ("plan", "copy_in", "kernel", "copy_out", "encode")

Mode = Literal["flat", "cascade", "explicit"]
REASONS: Final = ("overloaded", "not_ready", "deadline_exceeded", "cancelled")
STATES: Final = ("free", "referenced", "cached", "pinned")
MISSES: Final = (
    *("never_stored", "evicted", "other_salt", "other_model"),
    *("corrupt", "unreadable"),
)
OUTCOMES: Final = (
    *("found", "never_stored", "evicted", "other_stamp"),
    *("corrupt", "unreadable"),
)
TIERS: Final = ("host", "disk")
RESULTS: Final = ("hit", "miss")


@dataclass(frozen=True, slots=True)
class Spec:
    """One family. `unit` is what a value counts, `asks` the question that it answers."""

    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    asks: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; one more bucket has none."""
    values: tuple[str, ...] = ()
    """Values of its only label whose series exist from the start."""

    @property
    def size(self) -> int:
        """Cells of one series: a value, or a histogram's counts by bucket and its sum."""
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


REQUESTS: Final[dict[str, Spec]] = {
    "requests": Spec(
        "counter",
        "requests",
        "Requests with a response, by operation and code (ok, or the error's code).",
        "What is called how often, and which errors do callers get?",
        ("op", "code"),
    ),
    "request_duration_seconds": Spec(
        "histogram",
        "seconds",
        "Time from a request's arrival to its encoded response.",
        "How long do callers wait?",
        ("op",),
        SECONDS,
    ),
    "inflight": Spec(
        "gauge",
        "operations",
        "Operations accepted and not answered.",
        "How much work is in the engine?",
    ),
    "waiting": Spec(
        "gauge",
        "operations",
        "Operations accepted whose turn has not come.",
        "How near is server.queue_depth, where 429 begins?",
    ),
    "rejected": Spec(
        "counter",
        "operations",
        "Operations that did not run.",
        "Is more sent than the engine runs, or do callers give up?",
        ("reason",),
        values=REASONS,
    ),
    "sessions": Spec(
        "gauge",
        "connections",
        "Connections to the engine, doors included.",
        "How near is server.max_sessions?",
    ),
}
ENGINE: Final[dict[str, Spec]] = {
    "queue_duration_seconds": Spec(
        "histogram",
        "seconds",
        "Time an operation waited for its turn.",
        "Is the engine busy? It grows before anything is rejected.",
        (),
        SECONDS,
    ),
    "stage_duration_seconds": Spec(
        "histogram",
        "seconds",
        "Time of one stage of an operation.",
        "Where does an operation's time go?",
        ("stage",),
        SECONDS,
        STAGES,
    ),
    "batch_rows": Spec(
        "histogram",
        "rows",
        "Query rows of one attention launch.",
        "How large are the batches that run together?",
        (),
        ROWS,
    ),
    "slices": Spec(
        "counter",
        "slices",
        "Slices that long operations were cut into.",
        "Is there long work, between which others have turns?",
    ),
    "slow_passes": Spec(
        "counter",
        "passes",
        "Passes of a loop longer than 0.1 s, by process and longest operation.",
        "What made others wait?",
        ("process", "op"),
    ),
}
POOL: Final[dict[str, Spec]] = {
    "kv_pages": Spec(
        "gauge",
        "pages",
        "Pages of the pool: free, referenced by sequences or leases, cached, or pinned.",
        "Who holds the pool, and what can be evicted?",
        ("state",),
        values=STATES,
    ),
    "kv_cache_usage_ratio": Spec(
        "gauge",
        "ratio",
        "Referenced pages over all pages.",
        "How near is the pool to a 507?",
    ),
    "out_of_pages": Spec(
        "counter",
        "operations",
        "Operations rejected for lack of pages.",
        "Do schedulers preempt too late?",
    ),
    "sequences": Spec(
        "gauge", "sequences", "Sequences alive.", "Are sequences deleted when their chats end?"
    ),
    "leases": Spec(
        "gauge",
        "leases",
        "Leases that hold cached pages.",
        "Does a scheduler renew leases that it forgot?",
    ),
    "prefix_nodes": Spec(
        "gauge", "nodes", "Nodes of the prefix tree.", "How branched are the prompts?"
    ),
    "tokens_appended": Spec(
        "counter",
        "tokens",
        "Tokens written, counted once per layer.",
        "How much KV is written?",
    ),
    "kv_bytes_read": Spec(
        "counter", "bytes", "Pool bytes that attention read.", "How much memory traffic is there?"
    ),
    "kv_bytes_saved": Spec(
        "counter",
        "bytes",
        "Additional pool bytes that flat attention would read.",
        "What does sharing prefixes save?",
    ),
    "cascade_batches": Spec(
        "counter",
        "operations",
        "Attention operations by mode.",
        "Does attention read shared pages once?",
        ("mode",),
        values=get_args(Mode),
    ),
    "prefix_tokens": Spec(
        "counter",
        "tokens",
        "Tokens of prompts looked up, in whole pages, by hit or miss.",
        "What share of the prompts was cached?",
        ("result",),
        values=RESULTS,
    ),
    "pages_evicted": Spec(
        "counter",
        "pages",
        "Cached pages evicted.",
        "Is the pool too small for the prompts that return?",
    ),
}
LOWER: Final[dict[str, Spec]] = {
    "tier_records": Spec(
        "gauge",
        "pages",
        "Pages in the tiers below the pool.",
        "How full are the tiers?",
        ("tier",),
        values=TIERS,
    ),
    "tier_up": Spec(
        "gauge",
        "0 or 1",
        "1 while a tier below the pool is in use.",
        "Has a disk failed? In a cluster it is the number of engines.",
        ("tier",),
        values=TIERS,
    ),
    "tier_pages_moved": Spec(
        "counter",
        "pages",
        "Pages moved to (in) or from (out) a tier.",
        "Are the tiers used?",
        ("tier", "way"),
    ),
    "tier_bytes_moved": Spec(
        "counter",
        "bytes",
        "Bytes of pages moved to (in) or from (out) a tier.",
        "How fast are the tiers?",
        ("tier", "way"),
    ),
    "tier_seconds": Spec(
        "counter", "seconds", "Time of these moves.", "How busy are the tiers?", ("tier", "way")
    ),
    "records": Spec(
        "gauge",
        "records",
        "Records in host memory and on disk.",
        "How full are the tiers with records?",
        ("tier",),
        values=TIERS,
    ),
    "record_bytes_moved": Spec(
        "counter",
        "bytes",
        "Bytes of records moved to (in) or from (out) a tier.",
        "Who fills the tiers with records, and are these read?",
        ("tier", "way"),
    ),
    "record_lookups": Spec(
        "counter",
        "records",
        "Records looked up or read, by outcome: found, or the reason of the miss.",
        "Are records found, or is a tier too small (evicted), or a disk failing (corrupt)?",
        ("outcome",),
        values=OUTCOMES,
    ),
    "tier_misses": Spec(
        "counter",
        "pages",
        "Pages at which a prefix ends, by why no tier has them, or why they were not loaded.",
        "Would a larger tier help, or is a disk failing (corrupt, unreadable)?",
        ("reason",),
        values=MISSES,
    ),
}
BY_NAMESPACE: Final[dict[str, Spec]] = {
    "namespace_kv_pages": Spec(
        "gauge",
        "pages",
        "Pages of a namespace by state, as of the last quarter of a second.",
        "Which tenant holds the pool?",
        ("namespace", "state"),
        values=STATES[1:],
    ),
    "namespace_sequences": Spec(
        "gauge",
        "sequences",
        "Sequences of a namespace, unfinished imports included.",
        "Whose sequences are they?",
        ("namespace",),
    ),
    "namespace_requests": Spec(
        "counter",
        "operations",
        "Operations of a namespace that the engine answered.",
        "Which tenant sends the load?",
        ("namespace",),
    ),
    "namespace_rejected": Spec(
        "counter",
        "operations",
        "Operations of a namespace that the engine rejected: 507, 429 or 504.",
        "Which tenant is out of pages, or sends too much?",
        ("namespace", "reason"),
        values=("out_of_pages", "out_of_sequences", "overloaded", "deadline_exceeded"),
    ),
    "namespace_queue_seconds": Spec(
        "counter",
        "seconds",
        "Time that a namespace's operations waited for their turns.",
        "Which tenant waits? Over namespace_requests it is the mean.",
        ("namespace",),
    ),
    "namespace_tokens_appended": Spec(
        "counter",
        "tokens",
        "Tokens that a namespace wrote, counted once per layer.",
        "Which tenant writes?",
        ("namespace",),
    ),
    "namespace_prefix_tokens": Spec(
        "counter",
        "tokens",
        "Tokens of a namespace's prompts looked up, by hit or miss.",
        "Which tenant's prompts are cached?",
        ("namespace", "result"),
        values=RESULTS,
    ),
}
"""`values` are those of the last label; `namespace` is the first one."""
CLUSTER: Final[dict[str, Spec]] = {
    "engine_kv_pages": Spec(
        "gauge",
        "pages",
        "Pages of a cluster's engine, as last reported to a door.",
        "Are the engines filled evenly?",
        ("door", "engine", "state"),
    ),
    "engine_sequences": Spec(
        "gauge",
        "sequences",
        "Sequences on one engine.",
        "Are sequences spread, and does a drain progress?",
        ("door", "engine"),
    ),
    "engine_queue_seconds": Spec(
        "gauge",
        "seconds",
        "Running mean of the time that calls wait at one engine.",
        "Is one engine busier than others?",
        ("door", "engine"),
    ),
    "engine_calls": Spec(
        "counter",
        "calls",
        "Calls answered by one engine.",
        "Where do calls go?",
        ("door", "engine"),
    ),
    "engine_moved": Spec(
        "counter",
        "sequences",
        "Sequences migrated from a draining engine.",
        "Does a drain move sequences?",
        ("door", "engine"),
    ),
    "engine_not_moved": Spec(
        "gauge",
        "sequences",
        "Sequences that could not be migrated at the last attempt.",
        "Is a drain stuck?",
        ("door", "engine"),
    ),
    "engine_up": Spec(
        "gauge",
        "0 or 1",
        "1 while the engine can be called.",
        "Is an engine lost?",
        ("door", "engine"),
    ),
}
PROCESSES: Final[dict[str, Spec]] = {
    "process_restarts": Spec(
        "counter", "restarts", "Restarts of processes.", "Does a process die?", ("process",)
    ),
    "log_lines_dropped": Spec(
        "counter",
        "lines",
        "Log lines dropped: standard error was not read, or not writable.",
        "Does the log have everything?",
        ("process",),
    ),
    "build_info": Spec(
        "gauge",
        "1",
        "Constant 1; the version and backend are its labels.",
        "Which version runs?",
        ("version", "backend"),
    ),
}
GROUPS: Final[dict[str, dict[str, Spec]]] = {
    "Requests": REQUESTS,
    "The engine": ENGINE,
    "The pool": POOL,
    "Tiers": LOWER,
    "Namespaces": BY_NAMESPACE,
    "Engines of a cluster": CLUSTER,
    "Processes": PROCESSES,
}
SPECS: Final = {name: spec for group in GROUPS.values() for name, spec in group.items()}
"""Every family by its name without `attnd_`, and of a counter without `_total`."""
