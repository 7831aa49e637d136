"""What lanes send to the driver, without one: waits and writes of flags; whose arena is whose."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from struct import unpack_from
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cupy")

from attnd.torch import driver
from attnd.torch.arena import DeviceArena

from kernels.cuda.lanes import flags
from kernels.lanes import lane as lanes_module
from kernels.lanes.lane import Owner


class Driver:
    """Records its arguments."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, int, int, int]]] = []

    def __call__(self, stream: int, count: int, packed: Any, options: int) -> int:
        assert (stream, options, len(packed.raw) // 48) == (7, 0, count)
        self.sent.append([unpack_from("<I4xQQI", packed, 48 * i) for i in range(count)])
        return 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int, int]]]:
    fake = Driver()
    monkeypatch.setattr(flags, "_batch", lambda: fake)
    return fake.sent


def test_a_turn_says_done_then_waits_and_sets_the_flag_back(sent: list[Any]) -> None:
    of = flags.Flags(4096)
    for before, after in ((None, 0), (0, 3), (3, None)):
        of.turn(before, after)(7)
    wait, write = flags.WAIT, flags.WRITE
    assert sent == [
        [(wait, 4096, 1, 1), (write, 4096, 0, 0)],
        [(write, 4100, 1, 0), (wait, 4120, 1, 1), (write, 4120, 0, 0)],
        [(write, 4124, 1, 0)],
    ]


def test_many_flags_go_in_parts_that_the_driver_takes(sent: list[Any]) -> None:
    flags.Flags(0).all_ready(range(300))(7)
    assert [len(part) for part in sent] == [128, 128, 44]
    assert sent[2][-1] == (flags.WRITE, 8 * 299, 1, 0)


def test_both_ends_pack_operations_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        cuStreamBatchMemOp_v2 = fake = Driver()  # noqa: N815, RUF100

    monkeypatch.setattr(driver, "library", lambda: Library)
    driver.operations([(driver.WRITE, 8, 1), (driver.WAIT, 12, 1), (driver.WRITE, 12, 0)])(7)
    assert Library.fake.sent == [[(2, 8, 1, 0), (1, 12, 1, 1), (2, 12, 0, 0)]]


@pytest.mark.parametrize("device", [0, 1])
def test_a_layer_is_released_while_its_arenas_device_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    current, sent = [0], []

    @contextmanager
    def made_current(other: torch.device) -> Iterator[None]:
        before, current[0] = current[0], other.index
        yield
        current[0] = before

    default = SimpleNamespace(cuda_stream=0)  # the driver's name of any device's default stream
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    arena = DeviceArena.__new__(DeviceArena)
    arena.device = torch.device("cuda", device)
    arena._turns = [lambda stream: sent.append((current[0], stream))]
    arena.hand_over(0)
    assert (sent, current) == ([(device, 0)], [0])


def test_an_owner_has_ended_when_its_process_has_ended_even_unnoticed() -> None:
    assert not Owner.of(os.getpid()).has_ended
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = Owner.of(process.pid)
        assert not owner.has_ended
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
        assert owner.has_ended
    assert owner.has_ended and Owner.of(process.pid).started == ""


def test_an_owner_that_is_not_visible_never_counts_as_ended() -> None:
    assert not Owner(0, "").has_ended


KNOWN = Owner(70, "1", "a", 1000)


@pytest.mark.parametrize(
    ("later", "earlier", "may"),
    [
        (KNOWN, KNOWN, True),
        (Owner(71, "1", "a", 1000), KNOWN, False),
        (Owner(70, "1", "b", 1000), KNOWN, False),
        (Owner(70, "1", "a", 1001), KNOWN, False),
        (Owner(0, "", "a", 1000), Owner(0, "", "a", 1000), False),
        (Owner(-1), Owner(-1), False),
        (KNOWN, Owner(0, "", "a", 1000), False),
        (Owner(0, "", "a", 1000), KNOWN, False),
    ],
    ids=[
        "the same process",
        "another process",
        "another namespace",
        "another user",
        "a process that cannot be seen",
        "two of which nothing is known",
        "behind one that cannot be seen",
        "one that cannot be seen behind a living one",
    ],
)
def test_an_arena_is_reused_only_by_the_same_namespace_and_user(
    monkeypatch: pytest.MonkeyPatch, later: Owner, earlier: Owner, may: bool
) -> None:
    monkeypatch.setattr(lanes_module, "process_start", lambda pid: "1")
    assert later.may_follow(earlier) is may


@pytest.mark.parametrize(("namespace", "uid", "may"), [("a", 1000, True), ("b", 1000, False)])
def test_an_arena_of_a_process_that_ended_stays_in_its_namespace(
    monkeypatch: pytest.MonkeyPatch, namespace: str, uid: int, may: bool
) -> None:
    monkeypatch.setattr(lanes_module, "process_start", lambda pid: "")
    assert KNOWN.has_ended
    assert Owner(71, "2", namespace, uid).may_follow(KNOWN) is may
