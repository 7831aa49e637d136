"""Events over ZeroMQ, heard by a subscriber that knows vLLM's format and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from http_messages import PAGE_SIZE, store
from http_process import is_ready, listening
from http_service import SECRET, Service, serving

from config.settings import SettingsError, load_settings
from service.doors.kit.process import Setup
from service.doors.zmq import server
from service.doors.zmq.server import ZmqServer, payload
from service.metrics import Metrics
from tests.harness.plain_http import http_client
from tests.harness.processes import kill, wait_until_dead
from tests.harness.waiting import WAIT_S, wait_for

END = b"\xff" * 8


class Subscriber:
    """Keeps the blocks of the pool that a publisher reports, and requests missed batches, as
    subscribers of vLLM 0.26 and newer do."""

    def __init__(self, context: zmq.Context[Any], events: str, replay: str, topic: str) -> None:
        self.context = context
        self.sub = context.socket(zmq.SUB)
        self.sub.rcvtimeo = int(1e3 * WAIT_S)
        self.sub.connect(events)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.topic = topic.encode()
        self.where = replay
        self.blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.last = -1
        self.times: dict[int, float] = {}

    def hear(self) -> list[dict[str, Any]]:
        """The next batch."""
        _, number, payload = self.sub.recv_multipart()
        if 0 <= self.last < int.from_bytes(number, "big") - 1:
            self.replay(self.last + 1)
        return self.take(number, payload)

    def hear_until(self, kind: str) -> dict[str, Any]:
        """The next event of a type."""
        while not (found := [event for event in self.hear() if event["type"] == kind]):
            pass
        return found[0]

    def take(self, number: bytes, payload: bytes) -> list[dict[str, Any]]:
        when, events, rank = msgspec.msgpack.decode(payload)
        assert abs(when - time.time()) < 60 and rank == 0
        self.last = int.from_bytes(number, "big")
        if events and events[0]["type"] != "AllBlocksCleared":
            assert self.times.setdefault(self.last, when) == when, "a batch has one time"
        for event in events:
            if event.get("medium", "GPU") != "GPU":
                continue
            match event["type"]:
                case "BlockStored":
                    parent, size = event["parent_block_hash"], event["block_size"]
                    ids = event["token_ids"]
                    assert len(ids) == size * len(event["block_hashes"])
                    for at, block in enumerate(event["block_hashes"]):
                        self.blocks[block] = (parent, ids[at * size : (at + 1) * size])
                        parent = block
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        self.blocks.pop(block, None)
                case "AllBlocksCleared":
                    self.blocks.clear()
        return list(events)

    def replay(self, start: int) -> int:
        """Ask for all from a sequence on; how many batches came."""
        with self.context.socket(zmq.DEALER) as asking:
            asking.rcvtimeo, asking.linger = int(1e3 * WAIT_S), 0
            asking.connect(self.where)
            asking.send_multipart([b"not a request"])
            asking.send_multipart([b"", start.to_bytes(8, "big")])
            count = 0
            while (message := asking.recv_multipart()) != [b"", b"", END, b""]:
                empty, topic, number, payload = message
                assert (empty, topic) == (b"", self.topic)
                self.take(number, payload)
                count += 1
            return count


def subscriber_types(layout: str, *, old: bool = False) -> Any:
    """A batch whose events are typed as a subscriber of vLLM types them; `old`: before vLLM had
    the last fields."""
    options = {"tag": True, "array_like": layout == "array"}
    hashed = bytes | int
    stored: list[Any] = [
        ("block_hashes", list[hashed]),
        ("parent_block_hash", hashed | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
    ]
    removed: list[Any] = [("block_hashes", list[hashed]), ("medium", str | None)]
    if not old:
        stored += [("lora_name", str | None), ("extra_keys", list[Any] | None, None)]
        stored += [("group_idx", int | None, None), ("kv_cache_spec_kind", str | None, None)]
        removed += [("group_idx", int | None, None)]
    if layout == "map" and not old:  # fields of 0.33, which come in any order
        stored += [("event_version", int, 1), ("locality", str | None, None)]
        removed += [("locality", str | None, None)]
    events = (
        msgspec.defstruct("BlockStored", stored, **options),
        msgspec.defstruct("BlockRemoved", removed, **options),
        msgspec.defstruct("AllBlocksCleared", [], **options),
    )
    batch = [("ts", float), ("events", list[events[0] | events[1] | events[2]]), ("rank", int)]
    return msgspec.defstruct("KVEventBatch", batch, array_like=True)


STORED = {
    "type": "stored",
    "namespace": "default",
    "time": 1.5,
    "parent_key": "0f" * 16,
    "page_keys": ["ab" * 16, "cd" * 16],
    "token_ids": [1, 2, 3, 4],
    "page_size": 2,
}
REMOVED = {"type": "removed", "namespace": "default", "time": 1.5, "page_keys": ["ab" * 16]}
CLEARED = {"type": "cleared", "namespace": "default", "time": 1.5}


@pytest.mark.parametrize("layout", ["map", "array"])
@pytest.mark.parametrize("old", [False, True])
def test_a_typed_subscriber_of_vllm_reads_its_layout(layout: Any, old: bool) -> None:
    decoder = msgspec.msgpack.Decoder(subscriber_types(layout, old=old))
    (stored,) = decoder.decode(payload(STORED, layout)).events
    assert stored.block_hashes == [b"\xab" * 16, b"\xcd" * 16]
    assert (stored.parent_block_hash, stored.block_size) == (b"\x0f" * 16, 2)
    assert (stored.token_ids, stored.lora_id, stored.medium) == ([1, 2, 3, 4], None, "GPU")
    (removed,) = decoder.decode(payload(REMOVED, layout)).events
    assert (removed.block_hashes, removed.medium) == ([b"\xab" * 16], "GPU")
    if not old:
        assert (stored.lora_name, stored.extra_keys, stored.group_idx) == (None, None, 0)
        assert stored.kv_cache_spec_kind == "full_attention" and removed.group_idx == 0
    (cleared,) = decoder.decode(payload(CLEARED, layout)).events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert decoder.decode(payload({"type": "pressure", "time": 1.5}, layout)).events == []


def test_images_are_reported_as_vllm_reports_them() -> None:
    """Of each page with some: pairs of the hash as hex, and where it begins in the page."""
    extra = [None, [{"first_token": 1, "key": "0c" * 32}]]
    (event,) = msgspec.msgpack.decode(payload(STORED | {"extra_keys": extra}, "map"))[1]
    assert event["extra_keys"] == [None, [["0c" * 32, 1]]]


def test_a_publisher_of_arrays_sends_arrays(tmp_path: Path) -> None:
    with (
        serving(*endpoints(tmp_path), "--cache.zmq-layout", "array") as service,
        service.client() as client,
        publishing(service),
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
    ):
        sub.rcvtimeo, sub.linger = int(1e3 * WAIT_S), 0
        sub.connect(f"ipc://{tmp_path}/events")
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        time.sleep(0.5)
        store(client, list(range(PAGE_SIZE)))
        decoder = msgspec.msgpack.Decoder(subscriber_types("array"))
        while "Stored" not in str((events := decoder.decode(sub.recv_multipart()[2]).events)[:1]):
            pass
        (stored,) = events
        assert stored.token_ids == list(range(PAGE_SIZE)) and stored.group_idx == 0


@contextmanager
def publishing(service: Service) -> Iterator[ZmqServer]:
    made = ZmqServer(
        Setup(service.settings, Metrics("zmq-0"), service.engine_socket, "zmq-0", SECRET)
    )
    thread = threading.Thread(target=lambda: asyncio.run(made.serve()), name="zmq")
    thread.start()
    try:
        wait_for(lambda: made.loop is not None, "the publisher")
        yield made
    finally:
        assert made.loop is not None
        made.loop.call_soon_threadsafe(made.drain)
        thread.join(WAIT_S)
        assert not thread.is_alive() and not made.failed


@contextmanager
def subscribed(folder: Path) -> Iterator[Subscriber]:
    context = zmq.Context()
    one = Subscriber(context, f"ipc://{folder}/events", f"ipc://{folder}/replay", "kv")
    try:
        yield one
    finally:
        context.destroy(linger=0)


def endpoints(folder: Path) -> tuple[str, ...]:
    return (
        *("--cache.zmq-endpoint", f"ipc://{folder}/events", "--cache.zmq-topic", "kv"),
        *("--cache.zmq-replay-endpoint", f"ipc://{folder}/replay"),
    )


def test_a_subscriber_tracks_the_cache_and_requests_missed_events(tmp_path: Path) -> None:
    ids = list(range(3 * PAGE_SIZE))
    with (
        serving(*endpoints(tmp_path)) as service,
        service.client() as client,
        publishing(service),
        subscribed(tmp_path) as one,
    ):
        one.replay(0)  # the publisher is there
        time.sleep(0.2)  # and so is the subscription
        store(client, ids)
        stored = one.hear_until("BlockStored")
        assert stored["block_size"] == PAGE_SIZE and stored["parent_block_hash"] is None
        message = [one.blocks[block] for block in stored["block_hashes"]]
        assert [ids for _, ids in message] == [ids[at : at + PAGE_SIZE] for at in (0, 4, 8)]
        store(client, [*ids, *range(PAGE_SIZE)])
        more = one.hear_until("BlockStored")
        assert more["parent_block_hash"] == stored["block_hashes"][-1] and len(one.blocks) == 4
        client.post("/v1/prefix/clear", json={})
        one.hear_until("AllBlocksCleared")
        assert one.blocks == {}
        first = one.last - 3
        with subscribed(tmp_path) as late:
            assert late.replay(first) == 4 and late.last == one.last
            assert late.replay(one.last) == 1
            assert late.replay(one.last + 1) == 0
            assert late.replay(0) == 5, "AllBlocksCleared, and all that is kept"


def test_too_many_subscriptions_disconnect_all_and_subscribers_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_SUBSCRIPTIONS", 50)
    with (
        serving(*endpoints(tmp_path)) as service,
        service.client() as client,
        publishing(service) as publisher,
        subscribed(tmp_path) as one,
        one.context.socket(zmq.SUB) as many,
    ):
        one.replay(0)
        before = publisher.out
        many.linger = 0
        many.connect(f"ipc://{tmp_path}/events")
        for number in range(51):
            many.setsockopt_string(zmq.SUBSCRIBE, f"{number}")
        wait_for(lambda: publisher.out is not before, "another socket")
        many.disconnect(f"ipc://{tmp_path}/events")
        one.sub.rcvtimeo = 100
        for number in range(100):  # until the subscriber is back
            store(client, list(range(number, number + PAGE_SIZE)))
            with suppress(zmq.Again):
                one.hear_until("BlockStored")
                break
        assert one.blocks


@pytest.mark.long
def test_the_service_runs_the_publisher_as_a_process_of_its_own(tmp_path: Path) -> None:
    with listening(*endpoints(tmp_path)) as (running, url), subscribed(tmp_path) as one:
        running.find("replays of events over ZeroMQ at .*/replay")
        with http_client(url) as client:
            one.replay(0)
            time.sleep(0.2)
            store(client, list(range(PAGE_SIZE)))
            one.hear_until("BlockStored")
        assert running.stop() == 0


@pytest.mark.long
def test_a_cluster_publishes_the_events_of_its_router_and_of_the_next_one(tmp_path: Path) -> None:
    """With the numbers that they have over HTTP."""
    with (
        listening(*endpoints(tmp_path), "--cluster.engines", "2") as (running, url),
        subscribed(tmp_path) as one,
    ):
        one.replay(0)
        for seed in (1, 2):
            wait_for(lambda: is_ready(url), "the router")
            with http_client(url) as client:
                before = client.get("/v1/events/page?after=0").json()["next"]
                store(client, [seed] * PAGE_SIZE)
                while one.hear_until("BlockStored")["token_ids"] != [seed] * PAGE_SIZE:
                    pass
                page = client.get(f"/v1/events/page?after={before}").json()
                assert [event["id"] for event in page["events"]] == [one.last]
            if seed == 1:
                router = running.pid("http-0")
                kill(router)
                wait_until_dead(router)
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cache.zmq-endpoint", "tcp://0.0.0.0:5557"), "auth.open"),
        (
            ("--cache.zmq-endpoint", "ipc://x", "--cache.zmq-replay-endpoint", "tcp://*:5558"),
            "auth.open",
        ),
        (("--cache.zmq-endpoint", "ipc://x", "--cache.events-history", "0"), "events_history"),
        (("--cache.zmq-replay-endpoint", "ipc://x"), "set that too"),
        (("--cache.zmq-endpoint", "http://x"), "zmq_endpoint"),
    ],
)
def test_endpoints_that_cannot_be_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(arguments)
