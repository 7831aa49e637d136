"""The metrics by name, label and unit, as dashboards rely on them; of one process and of many."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import Metrics
from service.processes.cells import Cells, make_shared
from tests.harness.processes import python, start

PROGRAM = """
import sys
from service.metrics import Metrics
name, *pairs = sys.argv[1:]
metrics = Metrics(name, {key: int(fd) for key, fd in (pair.split("=") for pair in pairs)})
metrics.observe("decode", "ok", 0.002)
metrics.observe(name, "ok", 0.3)
metrics.set(2, "inflight")
metrics.set(3 if name == "engine" else 0, "sessions")
metrics.add(10, "tokens_appended")
if name == "engine":
    metrics.set(30, "kv_pages", "free")
    metrics.set(1, "build_info", "1.2.3", "cpu")
print("up", flush=True)
sys.stdin.read()
"""
RENDER = """
import sys
from service.metrics import Metrics
pairs = [pair.split("=") for pair in sys.argv[2:]]
sys.stdout.write(Metrics(sys.argv[1], {key: int(fd) for key, fd in pairs}).render()[0].decode())
"""


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{label values}` -> value."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return read(body.decode())


def read(text: str) -> dict[str, float]:
    """An exposition's samples, each of which is there once."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = ",".join((sample.name, *(sample.labels[key] for key in sorted(sample.labels))))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def filled() -> Metrics:
    of_main = make_shared()
    Cells(of_main).block(("process_restarts", "http-0"), 1)[0] += 1.0  # as the supervisor does
    metrics = Metrics("main", {"main": of_main})
    metrics.set(1, "build_info", "1.2.3", "cpu")
    metrics.engine("engine-0", {"free": 7}, 2, 0.5, 10)
    metrics.moved("engine-0", 3, 1)
    metrics.observe("decode", "ok", 0.002)
    metrics.sample(0.001, "queue_duration_seconds")
    metrics.sample(0.0005, "stage_duration_seconds", "kernel")
    metrics.observe("decode", "overloaded", 0.0001)
    metrics.add(1, "rejected", "overloaded")
    metrics.set(3, "inflight")
    metrics.sample(17, "batch_rows")
    for name, value in (("inflight", 2), ("waiting", 1), ("sessions", 2), ("leases", 2)):
        metrics.set(value, name)
    metrics.add(5, "tokens_appended")
    for mode in ("cascade", "explicit"):
        metrics.add(1000, "kv_bytes_read")
        metrics.add(1, "cascade_batches", mode)
    metrics.add(400, "kv_bytes_saved")
    metrics.add(3, "slices")
    metrics.slow_pass("gather")
    metrics.log_lines_dropped(2)
    metrics.add(1, "out_of_pages")
    metrics.set(9, "pages_evicted")
    for state, pages in (("free", 30), ("referenced", 10), ("cached", 6), ("pinned", 4)):
        metrics.set(pages, "kv_pages", state)
    metrics.set(4, "sequences")
    metrics.set(2, "prefix_nodes")
    metrics.add(48, "prefix_tokens", "hit")
    metrics.add(16, "prefix_tokens", "miss")
    for name in ("tier_pages_moved", "tier_bytes_moved", "tier_seconds"):
        metrics.add(1, name, "disk", "out")
    return metrics


def test_events_are_counted_in_base_units() -> None:
    found = samples(filled())
    wanted = {
        "attnd_requests_total,ok,decode": 1,
        "attnd_requests_total,overloaded,decode": 1,
        "attnd_request_duration_seconds_count,decode": 2,
        "attnd_request_duration_seconds_sum,decode": 0.0021,
        "attnd_request_duration_seconds_bucket,0.0001,decode": 1,
        "attnd_request_duration_seconds_bucket,0.001,decode": 1,
        "attnd_request_duration_seconds_bucket,0.0025,decode": 2,
        "attnd_request_duration_seconds_bucket,+Inf,decode": 2,
        "attnd_queue_duration_seconds_sum": 0.001,
        "attnd_stage_duration_seconds_sum,kernel": 0.0005,
        "attnd_stage_duration_seconds_count,kernel": 1,
        "attnd_stage_duration_seconds_count,copy_in": 0,
        "attnd_batch_rows_sum": 17,
        "attnd_slices_total": 3,
        "attnd_tokens_appended_total": 5,
        "attnd_kv_pages,free": 30,
        "attnd_kv_pages,referenced": 10,
        "attnd_kv_pages,cached": 6,
        "attnd_kv_pages,pinned": 4,
        "attnd_leases": 2,
        "attnd_pages_evicted_total": 9,
        "attnd_prefix_tokens_total,hit": 48,
        "attnd_prefix_tokens_total,miss": 16,
        "attnd_kv_cache_usage_ratio": 0.2,
        "attnd_sequences": 4,
        "attnd_prefix_nodes": 2,
        "attnd_sessions": 2,
        "attnd_kv_bytes_read_total": 2000,
        "attnd_kv_bytes_saved_total": 400,
        "attnd_cascade_batches_total,cascade": 1,
        "attnd_cascade_batches_total,explicit": 1,
        "attnd_cascade_batches_total,flat": 0,
        "attnd_out_of_pages_total": 1,
        "attnd_rejected_total,overloaded": 1,
        "attnd_rejected_total,deadline_exceeded": 0,
        "attnd_inflight": 2,
        "attnd_waiting": 1,
        "attnd_engine_moved_total,main,engine-0": 3,
        "attnd_engine_not_moved,main,engine-0": 1,
        "attnd_build_info,cpu,1.2.3": 1,
        "attnd_process_restarts_total,http-0": 1,
    }
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value), key


def test_engines_are_reported_one_by_one_and_a_lost_one_has_nothing() -> None:
    metrics = Metrics("http-0")
    metrics.engine("engine-0", {"free": 7, "referenced": 3}, 2, 0.5, 10)
    metrics.engine("engine-1", {"free": 9}, 1, 0.0, 5)
    metrics.engine("engine-1", {"free": 0}, 0, 0.0, 2)
    found = samples(metrics)
    wanted = {
        "attnd_engine_kv_pages,http-0,engine-0,free": 7,
        "attnd_engine_sequences,http-0,engine-0": 2,
        "attnd_engine_queue_seconds,http-0,engine-0": 0.5,
        "attnd_engine_up,http-0,engine-0": 1,
        "attnd_engine_up,http-0,engine-1": 0,
        "attnd_engine_calls_total,http-0,engine-1": 7,
    }
    assert wanted.items() <= found.items()


def test_what_engines_elsewhere_have_counted_is_part_of_the_sums() -> None:
    door = Metrics("http-0")
    there = filled()
    door.remote.take("aaaa", there.own())
    door.remote.take("aaaa", there.own())
    door.remote.take("bbbb", {"tokens_appended": [7], "sessions": [1], "of/a/later/version": [1]})
    door.observe("decode", "ok", 0.002)
    found = samples(door)
    wanted = {
        "attnd_tokens_appended_total": 12,
        "attnd_kv_bytes_read_total": 2000,
        "attnd_kv_pages,free": 30,
        "attnd_sessions": 3,
        "attnd_requests_total,ok,decode": 2,
        "attnd_stage_duration_seconds_count,kernel": 1,
        "attnd_build_info,cpu,1.2.3": 1,
    }
    assert wanted.items() <= found.items()
    assert door.totals({"tokens_appended", "inflight"}) == {
        ("tokens_appended",): [12.0],
        ("inflight",): [2.0],
    }


def test_of_an_engine_elsewhere_that_is_lost_the_counters_stay() -> None:
    door = Metrics("http-0")
    door.remote.take("aaaa", {"tokens_appended": [5], "sessions": [1], "slices": [1, 2]})
    for tag in ("aaaa", "aaaa", "never met"):
        door.remote.lose(tag)
    found = samples(door)
    assert (found["attnd_tokens_appended_total"], found["attnd_sessions"]) == (5, 0)
    assert found["attnd_slices_total"] == 0, "blocks of another size are ignored"
    for number in range(300):
        door.remote.take(str(number), {"tokens_appended": [1]})
        door.remote.lose(str(number))
    assert samples(door)["attnd_tokens_appended_total"] == 305


def test_longer_than_the_last_bound_is_counted_without_one() -> None:
    metrics = Metrics()
    metrics.observe("merge", "ok", 31.0)
    found = samples(metrics)
    assert found["attnd_request_duration_seconds_bucket,30.0,merge"] == 0
    assert found["attnd_request_duration_seconds_bucket,+Inf,merge"] == 1


def test_two_services_in_one_process_count_apart() -> None:
    assert samples(filled())["attnd_tokens_appended_total"] == 5
    assert samples(Metrics())["attnd_tokens_appended_total"] == 0


def counting(name: str, shared: Mapping[str, int]) -> subprocess.Popen[str]:
    """A process that has counted as the service's process `name`, and waits."""
    pairs = [f"{process}={fd}" for process, fd in shared.items()]
    process = start(PROGRAM, name, *pairs, pass_fds=list(shared.values()))
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_every_process_shows_the_sum_of_all_and_dead_ones_keep_their_counters() -> None:
    shared = {name: make_shared() for name in ("engine", "http-0", "http-1")}
    with counting("engine", shared) as engine, counting("http-0", shared) as door:
        body = render_as_sibling("http-1", shared)
        assert body["attnd_requests_total,ok,decode"] == 2
        assert body["attnd_requests_total,ok,engine"] == 1
        assert body["attnd_tokens_appended_total"] == 20
        assert (body["attnd_inflight"], body["attnd_sessions"]) == (4, 3)
        assert body["attnd_kv_pages,free"] == 30 and body["attnd_build_info,cpu,1.2.3"] == 1
        for name in ("main", "engine", "http-0", "http-1"):
            assert body[f"process_resident_memory_bytes,{name}"] > 2**20, name
            assert body[f"process_open_fds,{name}"] >= 3, name
        door.communicate()
        body = render_as_sibling("http-1", shared)
        assert body["attnd_requests_total,ok,decode"] == 2
        assert (body["attnd_inflight"], body["attnd_kv_pages,free"]) == (2, 30)
        assert "process_open_fds,http-0" not in body
        with counting("http-0", shared) as door:  # started again
            body = render_as_sibling("http-1", shared)
            assert body["attnd_requests_total,ok,decode"] == 3
            assert body["attnd_inflight"] == 4
            door.communicate()
        engine.communicate()
    assert "attnd_build_info,cpu,1.2.3" not in render_as_sibling("http-1", shared)


def render_as_sibling(name: str, shared: Mapping[str, int]) -> dict[str, float]:
    """The metrics that the process `name` of the service renders."""
    pairs = (f"{key}={fd}" for key, fd in shared.items())
    return read(python(RENDER, name, *pairs, pass_fds=list(shared.values())))


def test_another_users_process_under_the_pid_of_a_dead_one_is_not_shown() -> None:
    shared = {name: make_shared() for name in ("engine", "http-0")}
    os.pwrite(shared["engine"], struct.pack("d", 1.0), 0)  # init is no sibling here
    assert "process_open_fds,engine" not in render_as_sibling("http-0", shared)


def test_each_of_many_engines_that_report_again_and_again_counts_once() -> None:
    door = Metrics("http-0")
    for _ in range(3):
        for number in range(306):
            door.remote.take(str(number), {"tokens_appended": [2]})
    assert door.totals({"tokens_appended"})["tokens_appended",][0] == 2 * 306
