"""Exports and imports by all clients between two services, lost and damaged on their way."""

from __future__ import annotations

import asyncio
import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import attnd
import numpy as np
import pytest
from attnd import AsyncClient, Client, ImportOptions, Prefix, Session, copy_sequence
from attnd.errors import ReplyLost
from attnd.http.blocking_transport import Response, SocketTransport
from attnd.http.messages import Request
from attnd.http.origin import origin_of
from numpy.typing import NDArray

from tests.client.conftest import Served

LAYERS, LENGTH = 2, 150
PART_BYTES = 2**16
TOKENS = list(range(LENGTH))
Array = NDArray[Any]


@pytest.fixture
def source(client: Client) -> Client:
    return client


@pytest.fixture
def target(other: Client) -> Client:
    return other


def grow(client: Client, name: str, length: int = LENGTH) -> None:
    rng = np.random.default_rng(3)
    client.create_sequence(name)
    for layer in range(LAYERS):
        k, v = rng.standard_normal((2, length, 2, 64)).astype(np.float32)
        client.append(layer, [name], k, v, append_indptr=[0, length])


def held(client: Client | Session, name: str) -> Array:
    gathered = [client.gather(layer, [name]) for layer in range(LAYERS)]
    return np.array([(one.k, one.v) for one in gathered])


def test_every_client_exports_imports_and_copies_to_the_bit(
    source: Client, target: Client, there: str, here: Served, tmp_path: Path
) -> None:
    grow(source, "a")
    wanted, reply = held(source, "a"), []
    progress = lambda done, of: reply.append((done, of))  # noqa: E731
    header = source.export("a", tmp_path / "one", part_bytes=PART_BYTES, progress=progress)
    assert reply == [(done + 1, header.num_parts) for done in range(header.num_parts)]
    assert header.num_parts > 2
    assert target.import_("a", tmp_path / "one").state == "done"
    file = io.BytesIO()
    with Session(here.road) as session:
        session.export("a", file, part_bytes=PART_BYTES)
        file.seek(0)
        session.import_("b", file)
        np.testing.assert_array_equal(held(session, "b"), wanted)
        assert copy_sequence(session, target, "a", "c").state == "done"

    async def run() -> None:
        client = AsyncClient(there)
        await client.export("a", tmp_path / "two", part_bytes=PART_BYTES)
        await client.import_("d", tmp_path / "two")
        with pytest.raises(attnd.SequenceExists):
            await client.import_("d", tmp_path / "two")
        await client.aclose()

    asyncio.run(run())
    for name in "acd":
        np.testing.assert_array_equal(held(target, name), wanted)


def test_named_pages_of_an_export_are_shared_and_named_by_the_import(
    source: Client, target: Client
) -> None:
    grow(source, "a")
    source.commit("a", Prefix(TOKENS))
    copy_sequence(source, target, "a")
    assert target.match_prefix(Prefix(TOKENS), lease_s=0).matched_len == 144
    free = target.pool().free
    state = copy_sequence(source, target, "a", "again", part_bytes=PART_BYTES)
    assert (state.cached_len, free - target.pool().free) == (144, 1)
    np.testing.assert_array_equal(held(target, "again"), held(source, "a"))
    alone = ImportOptions(share=False)
    assert copy_sequence(source, target, "a", "alone", options=alone).cached_len == 0


def test_further_keys_go_with_an_export(source: Client, target: Client) -> None:
    grow(source, "a")
    images = [(20, b"cat"), (100, bytes(32))]
    for committed in (0, 96):
        part = [(at - committed, key) for at, key in images if at >= committed]
        source.commit("a", Prefix(TOKENS[committed:], extra=part), offset=committed)
    copy_sequence(source, target, "a")
    for extra, length in ((images, 144), (images[:1], 96), ([(20, b"dog")], 16), ((), 16)):
        found = target.match_prefix(Prefix(TOKENS, extra=extra), lease_s=0).matched_len
        assert found == length, extra
    assert copy_sequence(source, target, "a", "again").cached_len == 144


def test_the_names_of_an_export_end_before_more_further_keys_than_a_request_may_have(
    source: Client,
) -> None:
    length, most = 66 * 16, 256
    grow(source, "long", length)
    for begin in (0, length // 2):
        extra = [(16 * page + at, b"x") for page in range(33) for at in range(4)]
        source.commit("long", Prefix(range(begin, begin + length // 2), extra=extra), offset=begin)
    header = source.export_header("long")
    assert header.fields["num_named"] == most // 4
    assert header.prefix is not None and len(header.prefix.extra) == most


def test_an_interrupted_export_and_import_go_on_where_they_were(
    source: Client, target: Client, tmp_path: Path
) -> None:
    grow(source, "a")
    path = tmp_path / "export"
    source.export("a", path, part_bytes=PART_BYTES)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(attnd.InterruptedExport):
        target.import_("a", path)
    under_way = target.get_import("a")
    assert under_way.state == "receiving" and 0 < under_way.next_part < under_way.num_parts
    done: list[int] = []
    source.export("a", path, part_bytes=PART_BYTES, progress=lambda part, _: done.append(part))
    assert path.read_bytes() == whole and done[0] > 1
    target.import_("a", path, progress=lambda part, _: done.append(part))
    assert done[-(under_way.num_parts - under_way.next_part) :][0] == under_way.next_part + 1
    np.testing.assert_array_equal(held(target, "a"), held(source, "a"))


def test_a_cancelled_export_ends_as_cancelled_when_its_thread_has_written(
    source: Client, here: Served, tmp_path: Path
) -> None:
    grow(source, "a")
    written, go_on = threading.Event(), threading.Event()

    def progress(done: int, of: int) -> None:
        written.set()
        assert go_on.wait(10)

    async def run() -> None:
        async with AsyncClient(uds=here.uds) as client:
            file = tmp_path / "one"
            task = asyncio.create_task(client.export("a", file, progress=progress))
            await asyncio.to_thread(written.wait, 10)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_an_export_of_an_earlier_generation_is_overwritten(source: Client, tmp_path: Path) -> None:
    grow(source, "a")
    path = tmp_path / "export"
    source.export("a", path, part_bytes=PART_BYTES)
    before = path.read_bytes()
    source.truncate("a", 100)
    header = source.export("a", path, part_bytes=PART_BYTES)
    assert header.fields["lengths"] == [100, 100]
    assert len(path.read_bytes()) < len(before)
    with pytest.raises(attnd.SequenceChanged):
        first = source.export_header("a")
        source.truncate("a", 90)
        source.export_part("a", first, 0, before=first.digest)


class Troubled:
    """A transport that loses or damages what its script says, by the number of a request."""

    def __init__(
        self, where: str, lose: tuple[int, ...] = (), damage: tuple[int, ...] = ()
    ) -> None:
        self.inner = SocketTransport(origin_of(where, None))
        self.lose, self.damage = lose, damage
        self.count = 0

    def send(self, request: Request) -> Response:
        self.count += 1
        if self.count in self.damage:
            *head, last = request.body
            raw = bytearray(last)
            raw[len(raw) // 2] ^= 1
            request = replace(request, body=(*head, bytes(raw)))
        response = self.inner.send(request)
        if self.count in self.lose:
            raise ReplyLost("the connection broke")
        return response

    def close(self) -> None:
        self.inner.close()


def test_lost_replies_and_damaged_parts_are_made_up_for(
    source: Client, target: Client, there: str
) -> None:
    grow(source, "a")
    header = source.export_header("a", part_bytes=PART_BYTES)
    last = header.num_parts + 6
    with Client(transport=Troubled(there, lose=(1, 4, last), damage=(7,))) as troubled:
        assert copy_sequence(source, troubled, "a", part_bytes=PART_BYTES).state == "done"
    np.testing.assert_array_equal(held(target, "a"), held(source, "a"))


def test_an_import_can_be_cancelled_and_its_errors_name_the_reason(
    source: Client, target: Client
) -> None:
    grow(source, "a")
    header = source.export_header("a", part_bytes=PART_BYTES)
    target.begin_import("b", header, idle_s=30)
    part = source.export_part("a", header, 1, before=header.digest)
    with pytest.raises(attnd.PartMismatch) as reply:
        target.import_part("b", part)
    assert (reply.value.part, reply.value.next_part) == (1, 0)
    assert reply.value.num_parts == header.num_parts
    other = source.export_header("a", part_bytes=2 * PART_BYTES)
    with pytest.raises(attnd.ImportExists) as exists:
        target.begin_import("b", other)
    assert exists.value.sequences == ("b",)
    first = source.export_part("a", header, 0, before=other.digest)
    with pytest.raises(attnd.DigestMismatch) as digest:
        target.import_part("b", first)
    assert digest.value.of == "before" and digest.value.given != digest.value.found
    assert target.pool().imports == 1
    target.cancel_import("b")
    with pytest.raises(attnd.UnknownImport) as unknown:
        target.get_import("b")
    assert unknown.value.sequences == ("b",)


def test_a_copy_continues_the_chain_of_its_exports_names(source: Client, target: Client) -> None:
    grow(source, "named")
    page_size, full = source.info().page_size, LENGTH // source.info().page_size
    source.commit("named", Prefix(TOKENS[: full * page_size]))
    copy_sequence(source, target, "named")
    copied = target.get_sequence("named")
    assert copied.known_len == copied.committed_len == full * page_size < LENGTH
    more = TOKENS[full * page_size :] + [7] * page_size
    k = np.zeros((LAYERS, full * page_size + len(more) - LENGTH, 2, 64), np.float32)
    ends = [0, k.shape[1]]
    made = target.append([*range(LAYERS)], ["named"], k, k, append_indptr=ends, token_ids=[more])
    assert made.known_len[0] == LENGTH + k.shape[1]
    assert made.committed_len[0] == made.known_len[0] // page_size * page_size > full * page_size
    prompt = Prefix(TOKENS[: full * page_size] + more)
    assert target.match_prefix(prompt, lease_s=0).matched_len == made.committed_len[0]
    target.delete_sequence("named")
    source.delete_sequence("named")
    for client in (source, target):
        client.clear()
