"""Attacks of one namespace on its neighbours, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from attnd import NewSequence, Prefix
from numpy.typing import NDArray

from bench.cases.loads import Heads
from service.core.keys import Prefix as PagePrefix
from service.core.keys import root_key

HEADS: Final = Heads(num_qo=4, num_kv=1, dim=32)
PAGE: Final = 16
LONG_ROWS: Final = 46 * 2**20 // (2 * HEADS.num_qo * HEADS.dim)
"""Rows of a prefill whose q has 46 MiB."""
CREATED_AT_ONCE: Final = 1000
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shot:
    """A call, and its number of repetitions in a burst."""

    operation: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Array] = field(default_factory=dict)
    times: int = 1
    answer_bytes: int = 2**16


Burst = Callable[[], Iterable[Shot]]
Prepare = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Attack:
    """`prepare` creates the burst's sequences by a client, before the measurement.

    `heads`: number of HTTP heads with large declared lengths whose bodies never come.
    `listeners`: number of streams of events that are read during the burst.
    `stops_engine`: an engine of the cluster is stopped (SIGSTOP) during the attack.
    `reads_no_log`: the service's log goes to a pipe without a reader.
    `has_disk`: the service writes commits to a disk, the victim's, too. `restarts`: the service is
    restarted after the preparation.
    """

    name: str
    burst: Burst
    prepare: Prepare | None = None
    heads: int = 0
    listeners: int = 0
    stops_engine: bool = False
    reads_no_log: bool = False
    has_disk: bool = False
    restarts: bool = False
    ways: tuple[str, ...] = ("session", "http")

    @property
    def is_apart(self) -> bool:
        """Whether it needs a service of its own."""
        return self.stops_engine or self.reads_no_log or self.has_disk

    def runs(self, service: str, way: str) -> bool:
        """Whether the attack applies to a service and a way."""
        fits = not self.has_disk if service != "one engine" else not self.stops_engine
        return way in self.ways and fits


# Preparations: each creates sequences `s0`, `s1`, ... by a client.


def ids(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def ones(num_rows: int, heads: int = 1) -> Array:
    return np.ones((num_rows, heads, HEADS.dim), np.float16)


def append(client: Any, name: str, num_tokens: int) -> None:
    """Append tokens at both layers."""
    rows = ones(num_tokens)
    for layer in range(2):
        client.append(layer, [name], rows, rows, append_indptr=[0, num_tokens])


def create(client: Any, count: int, parent: str | None = None) -> None:
    names = ids(count)
    for first in range(0, count, CREATED_AT_ONCE):
        some = names[first : first + CREATED_AT_ONCE]
        client.create_sequences([NewSequence(name, parent=parent) for name in some])


def empty(count: int) -> Prepare:
    """`count` sequences without tokens."""
    return lambda client: create(client, count)


def separate(count: int, num_tokens: int) -> Prepare:
    """`count` sequences of `num_tokens` tokens without common pages."""

    def prepare(client: Any) -> None:
        create(client, count)
        for name in ids(count):
            append(client, name, num_tokens)

    return prepare


def forks(count: int, num_pages: int) -> Prepare:
    def prepare(client: Any) -> None:
        client.create_sequences([NewSequence("trunk")])
        append(client, "trunk", num_pages * PAGE)
        create(client, count, "trunk")

    return prepare


def chain(depth: int) -> Prepare:
    """A sequence, and `depth` forks, each of the one before with a page more."""

    def prepare(client: Any) -> None:
        client.create_sequences([NewSequence("s0")])
        for number in range(depth):
            append(client, f"s{number}", PAGE)
            client.create_sequences([NewSequence(f"s{number + 1}", parent=f"s{number}")])

    return prepare


def cached(num_pages: int) -> Prepare:
    """A prompt of `num_pages` pages in the prefix cache."""

    def prepare(client: Any) -> None:
        client.create_sequences([NewSequence("prompt")])
        for _ in range(10):
            append(client, "prompt", num_pages * PAGE // 10)
        client.commit("prompt", Prefix(np.arange(num_pages * PAGE, dtype=np.uint32)))

    return prepare


# Bursts.


def calls(operation: str, times: int, answer_bytes: int = 2**16, **fields: Any) -> Burst:
    shot = Shot(operation, fields, times=times, answer_bytes=answer_bytes)
    return lambda: [shot]


def decodes(count: int, times: int, answer_bytes: int = 2**16) -> Burst:
    q = ones(count, HEADS.num_qo)
    shot = Shot("decode", {"layer": 0, "sequences": ids(count)}, {"q": q}, times, answer_bytes)
    return lambda: [shot]


def prefills(num_rows: int, times: int) -> Burst:
    """A prefill of `num_rows` query rows over the whole of one sequence, `times` times."""
    q = ones(num_rows, HEADS.num_qo)
    fields = {"layer": 0, "sequences": ids(1), "qo_indptr": [0, num_rows]}
    shot = Shot("prefill", fields, {"q": q}, times, 2 * q.nbytes)
    return lambda: [shot]


def create_and_delete(count: int) -> Burst:
    new = [{"id": name} for name in ids(count)]
    created = [
        Shot("create_sequences", {"sequences": new[first:][:CREATED_AT_ONCE]}, answer_bytes=2**20)
        for first in range(0, count, CREATED_AT_ONCE)
    ]
    return lambda: [*created, Shot("delete_sequences", {"prefix": ""})]


def deep_prefixes(count: int, num_pages: int) -> Burst:
    """Creates `count` sequences, each with a prefix of `num_pages` pages."""
    new: list[dict[str, Any]] = [{"prefix": {}} for _ in range(count)]
    indptr = [num_pages * PAGE * number for number in range(count + 1)]
    fields = {"sequences": new, "prefix_indptr": indptr}

    def burst() -> Iterable[Shot]:
        tokens = np.tile(np.arange(num_pages * PAGE, dtype=np.uint32), count)
        return [Shot("create_sequences", fields, {"token_ids": tokens}, 20)]

    return burst


def named_prompts(count: int, num_pages: int) -> Burst:
    """Creates `count` sequences with a reserve, whose appends name all their pages, and deletes
    them; other pages each time."""
    names, length = ids(count), num_pages * PAGE
    new = [{"id": name, "prefix": {"token_ids": []}, "reserve": length} for name in names]
    indptr = list(range(0, count * length + 1, length))
    rows = np.stack([ones(count * length)] * 2)
    fields = {"layers": [0, 1], "sequences": names, "append_indptr": indptr}
    rng = np.random.default_rng(0)

    def burst() -> Iterable[Shot]:
        tokens = rng.integers(2**32, size=count * length, dtype=np.uint32)
        return [
            Shot("create_sequences", {"sequences": new}),
            Shot("append", fields, {"k": rows, "v": rows, "token_ids": tokens}),
            Shot("delete_sequences", {"prefix": "s"}),
        ]

    return burst


def page_keys(num_pages: int) -> list[str]:
    """Keys of the attacker's pages that `cached` commits."""
    tokens = np.arange(num_pages * PAGE, dtype=np.uint32)
    chained = PagePrefix(tokens).chain(root_key("attacker", ""), PAGE)
    return [key.hex() for key in chained]


def pins(keys: Sequence[str], names: Iterable[str]) -> list[Shot]:
    """Calls of these names for each page."""
    hard = {"pin": {"hard": True}, "unpin": {}}
    return [
        Shot(name, {"page_key": key} | hard[name], {}, 1, 2**10) for key in keys for name in names
    ]


def pin_and_unpin(num_pages: int, first: int) -> Burst:
    """Hard pins of the pages of a prompt from `first` on, each removed again."""
    return lambda: pins(page_keys(num_pages)[first:], ("pin", "unpin"))


def pinned(num_pages: int, first: int) -> Prepare:
    """A cached prompt, and hard pins of its pages from `first` on."""

    def prepare(client: Any) -> None:
        cached(num_pages)(client)
        client.delete_sequences(prefix="")
        for key in page_keys(num_pages)[first:]:
            client.pin(key, hard=True)

    return prepare


def trunk(num_pages: int) -> Prepare:
    def prepare(client: Any) -> None:
        client.create_sequences([NewSequence("trunk")])
        for _ in range(10):
            append(client, "trunk", num_pages * PAGE // 10)

    return prepare


def grown_forks(count: int) -> Burst:
    """Creates forks of a trunk, appends a token to all of them at once, and deletes them."""
    names, rows = ids(count), ones(count)
    forked = [
        {"sequences": [{"id": name, "parent": "trunk"} for name in names[first:][:CREATED_AT_ONCE]]}
        for first in range(0, count, CREATED_AT_ONCE)
    ]
    fields = {"layer": 0, "sequences": names, "append_indptr": list(range(count + 1))}
    return lambda: [
        *(Shot("create_sequences", one, answer_bytes=2**22) for one in forked),
        Shot("append", fields, {"k": rows, "v": rows}, answer_bytes=2**20),
        Shot("delete_sequences", {"prefix": "s"}),
    ]


LONG_NAMES: Final = [f"{number:05d}" + "x" * 54 for number in range(4096)]
MANY_NUMBERS: Final = list(range(32_000))
ATTACKS: Final = (
    Attack("none", calls("get_sequence", 1, id="absent")),
    Attack("S10 300 calls of 250 KB headers", calls("gather", 300, layer=0, sequences=LONG_NAMES)),
    Attack(
        "S10 300 calls of 32,000 numbers",
        calls("match_prefix", 300, token_ids=MANY_NUMBERS, lease_s=0.0),
    ),
    Attack(
        "S11 256 page tables of 2,000 forks",
        calls("page_table", 256, 2**24, sequences=ids(2000)),
        forks(2000, 64),
    ),
    Attack(
        "S11 page tables of 4,000 forks of 60 pages",
        calls("page_table", 8, 2**26, sequences=ids(4000)),
        forks(4000, 60),
    ),
    Attack(
        "S11 256 gathers of 32,000 rows",
        calls("gather", 256, 2**23, layer=0, sequences=ids(16)),
        separate(16, 2000),
    ),
    Attack("S11 100 decodes of 64 x 2,000 in flight", decodes(64, 100), separate(64, 2000)),
    Attack(
        "S12 gathers of nothing of 4,096 forks",
        calls("gather", 48, 2**20, layer=0, sequences=ids(4096), start=0, stop=0),
        forks(4096, 512),
    ),
    Attack("S12 decodes of 4,096 empty sequences", decodes(4096, 48, 2**22), empty(4096)),
    Attack("S13 pool beside a chain of 4,000 forks", calls("pool", 16), chain(4000)),
    Attack("S14 create and delete 30,000", create_and_delete(30_000)),
    Attack("S14 create 8 with prefixes of 1,000 pages", deep_prefixes(8, 1000), cached(20_000)),
    Attack("S14 appends that name 4,000 pages", named_prompts(4, 1000)),
    Attack(
        "S14 page tables of a chain of 3,000",
        calls("page_table", 64, 2**26, sequences=ids(3000)),
        chain(3000),
    ),
    Attack("S15 98 heads without bodies", lambda: (), heads=98, ways=("http",)),
    Attack("S20 long prefills", prefills(LONG_ROWS, 8), separate(1, 1024)),
    # S16 comes after all that create sequences: its marks outlive it.
    Attack(
        "S17 an engine of the cluster is stopped", calls("list_sequences", 64), stops_engine=True
    ),
    Attack(
        "S18 the log has no reader",
        calls("get_sequence", 1000, id="absent"),
        reads_no_log=True,
        ways=("http",),
    ),
    Attack("T1 pins and unpins", pin_and_unpin(640, 0), cached(640), has_disk=True),
    Attack(
        "T1 one pin of 20,000 pages", pin_and_unpin(20_000, 19_999), cached(20_000), has_disk=True
    ),
    Attack(
        "T2 300 pins of 20,000 pages, and a restart",
        pin_and_unpin(20_000, 19_990),
        pinned(20_000, 19_700),
        has_disk=True,
        restarts=True,
    ),
    Attack("T3 4,000 forks of 24,000 pages", grown_forks(4000), trunk(24_000), has_disk=True),
    Attack("S19 900 listeners of events", calls("clear", 1), listeners=900, ways=("http",)),
)
