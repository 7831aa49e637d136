"""Operations of a cluster without sharded sequences, run where sharding cannot be imported.

`python -m tests.cluster.sharded.plain_service` is started by `test_without_sharding.py`.
"""

from __future__ import annotations

import numpy as np
from attnd import NewSequence, Session

from tests.cluster.checked_calls import Book
from tests.cluster.harness import HEADS, LAYERS, PAGE, SETTINGS, Cluster, rows, run
from tests.cluster.local_engines import local_engines

IDS = list(range(PAGE))


async def every_operation(cluster: Cluster) -> None:
    """Each must succeed; attention is compared with the oracle."""
    book, succeed = Book(cluster), cluster.ok
    await book.create("a")
    await book.append("a", 2 * PAGE + 1)
    await book.fork("a", "b", 2 * PAGE)
    for layer in range(LAYERS):
        await book.attend(["a", "b"], [3, 2], layer, appends=True, causal=True, window_left=5)
        await book.attend(["a", "b"], [1, 1], layer, appends=True)
        await book.attend(["b", "a"], [1, 1], layer, appends=False)
    offsets = {"offsets": [len(book.held["a"][0][0])]}
    await book.attend(["a"], [1], 0, appends=False, **offsets)
    for name in "ab":
        await book.check(name)
    q = rows(book.rng, 2, 2 * HEADS)
    level = {"sequences": ["a", "b"], "qo_indptr": [0, 1, 2]}
    await succeed("cascade", {"layer": 0, "levels": [level]}, q=q)
    kv = {"k": rows(book.rng, 2), "v": rows(book.rng, 2)}
    await succeed("ragged_prefill", {"qo_indptr": [0, 2], "kv_indptr": [0, 2]}, q=q, **kv)
    both = {"layers": [0, 1], "sequences": ["b"]}
    await succeed("append", both, **{name: np.stack([part[:1]] * 2) for name, part in kv.items()})
    await succeed("page_table", {"sequences": ["a", "b"]})
    await succeed("list_sequences", {"limit": 10})
    await book.truncate("a", PAGE + 2)
    await succeed("truncate", {"id": "a", "length": 2, "keep": [4]})
    await succeed("truncate_sequences", {"sequences": ["a", "b"], "lengths": [2, PAGE]})
    await succeed("commit", {"id": "b", "token_ids": IDS})
    named = {"sequences": ["b"], "token_ids": IDS, "names_indptr": [0, PAGE]}
    await succeed("commit_sequences", named)
    lease = {"token_ids": [*IDS, 7], "lease_s": 5.0}
    matched = await succeed("match_prefix", lease)
    await succeed("release_lease", {"id": matched.fields["lease"]["id"]})
    new = [{"id": "c", "prefix": {"token_ids": IDS}}, {"id": "d", "parent": "a"}]
    await succeed("create_sequences", {"sequences": new})
    refused = await cluster.call("create_sequences", {"sequences": [{"ranks": 3}]})
    assert refused.status == 422, refused
    await succeed("pool", {})
    await succeed("drain_engine", {"name": cluster.home("b")})
    await cluster.until(
        lambda: all(one.done() for one in cluster.router.drains.tasks.values()), "empty"
    )
    await succeed("get_sequence", {"id": "b"})
    await succeed("delete_sequence", {"id": "c"})
    await succeed("delete_sequences", {"ids": ["d"]})


def on_one_engine(path: str) -> None:
    with Session(path) as session:
        session.create_sequences([NewSequence("s")])
        slots = session.slots(1, 2 * HEADS)
        for offsets in ([0], [1]):
            with session.step(["s"], slots, offsets=offsets) as step:
                for layer in step.layers:
                    for array in (step.q(layer), step.k(layer), step.v(layer)):
                        array[:] = 1.0
                    step.attend(layer)
            step.wait()
        assert session.get_sequence("s").length == 2
        session.delete_sequence("s")


def main() -> None:
    with local_engines(2, SETTINGS) as engines:
        run(engines, every_operation)
    with local_engines(1, SETTINGS) as engines:

        async def step(cluster: Cluster) -> None:
            on_one_engine(engines.entries[0].address)

        run(engines, step)


if __name__ == "__main__":
    main()
    print("done")
