"""Operations of all engines: one answer of many."""

from __future__ import annotations

from typing import Any

from service.cluster.routing.joins import JOINS, shares
from service.operations.table import BY_NAME, OPERATIONS

BY_HAND = {
    *("delete_sequences", "match_prefix", "prefetch", "evict"),
    *("events", "engines", "snapshot", "holds"),
}
"""Joined by code of their own in `broadcast.py` and `deletes.py`."""


def test_every_operation_of_all_engines_has_its_way_of_joining() -> None:
    everywhere = {one.name for one in OPERATIONS if one.routed == "everywhere"}
    assert everywhere == BY_HAND | JOINS.keys()


def pool(referenced: int, sharing: float, integrity: str = "ok") -> dict[str, Any]:
    counts = ("cached", "pinned", "total", "available", "leases", "sequences", "imports", "nodes")
    numbers = dict.fromkeys(("free", *counts), 1)
    rest = {"referenced": referenced, "sharing_ratio": sharing, "integrity": integrity}
    rest["available_tokens"] = 10 * referenced
    return numbers | rest


def test_pools_are_added_and_sharing_is_that_of_all_pages() -> None:
    joined = JOINS["pool"]({}, [pool(1, 1.0), pool(3, 5.0, "a hole")])
    assert (joined["free"], joined["available"], joined["referenced"]) == (2, 2, 4)
    assert joined["available_tokens"] == 30, "a sequence is on one engine"
    assert (joined["sharing_ratio"], joined["integrity"]) == (4.0, "a hole")
    assert JOINS["pool"]({}, [pool(0, 1.0)])["sharing_ratio"] == 1.0
    model = BY_NAME["pool"].answer
    assert model is not None and model.model_validate(joined)


def listing(*ids: str, following: str | None = None) -> dict[str, Any]:
    return {"sequences": [{"id": name} for name in ids], "next": following}


def test_lists_are_one_by_id_with_the_same_page_size() -> None:
    join = JOINS["list_sequences"]
    joined = join({"limit": 3}, [listing("a", "d", "e", following="e"), listing("b", "c")])
    assert joined == listing("a", "b", "c", following="c")
    joined = join({"limit": 9}, [listing("a"), listing("b")])
    assert joined == listing("a", "b")
    assert join({"limit": 2}, [listing(), listing()]) == listing()


def test_quotas_are_shared_out_and_add_up() -> None:
    parts = shares("set_namespace", {"name": "red", "max_pages": 10, "reserved_pages": 2}, 3)
    assert [part["max_pages"] for part in parts] == [4, 3, 3]
    assert [part["reserved_pages"] for part in parts] == [1, 1, 0]
    joined = JOINS["get_namespace"]({}, parts)
    assert joined == {"name": "red", "max_pages": 10, "reserved_pages": 2}
    unlimited = shares("set_namespace", {"name": "red", "max_pages": None}, 2)
    assert JOINS["get_namespace"]({}, unlimited)["max_pages"] is None
    assert JOINS["get_namespace"]({}, parts[:1]) == parts[0]


def test_the_instance_changes_with_each_engine_and_sizes_are_added() -> None:
    engines = [
        {
            "instance_id": name,
            "num_pages": 7,
            "numerics": "fast" if name == "second" else "invariant",
            "limits": {"max_sequences": 5, "queue_depth": 2},
            "tiers": [{"name": "host", "total_bytes": 8}, {"name": "disk", "total_bytes": size}],
        }
        for name, size in (("first", 100), ("second", 0), ("again", 1))
    ]
    assert JOINS["info"]({}, engines[:1]) == engines[0]
    joined = JOINS["info"]({}, engines[:2])
    assert joined["num_pages"] == 14
    assert joined["numerics"] == "fast", "what all engines promise"
    assert [tier["total_bytes"] for tier in joined["tiers"]] == [16, 100]
    assert joined["limits"] == {"max_sequences": 10, "queue_depth": 2}
    assert joined["instance_id"] == JOINS["info"]({}, engines[1::-1])["instance_id"]
    others = {JOINS["info"]({}, pair)["instance_id"] for pair in (engines[::2], engines[1:])}
    assert len({joined["instance_id"], "first", "second", "again"} | others) == 6
