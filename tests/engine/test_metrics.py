"""The metrics by name, label and unit, as dashboards rely on them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from service.engine.operations import Timings
from service.metrics import Metrics, PoolNumbers

LABELS = {
    "attnd_requests": {"op", "code"},
    "attnd_request_duration_seconds": {"op"},
    "attnd_queue_duration_seconds": set(),
    "attnd_stage_duration_seconds": {"stage"},
    "attnd_batch_rows": set(),
    "attnd_tokens_appended": set(),
    "attnd_kv_pages": {"state"},
    "attnd_kv_cache_usage_ratio": set(),
    "attnd_sequences": set(),
    "attnd_prefix_nodes": set(),
    "attnd_kv_bytes_read": set(),
    "attnd_kv_bytes_saved": set(),
    "attnd_cascade_batches": {"mode"},
    "attnd_out_of_pages": set(),
    "attnd_rejected": {"reason"},
    "attnd_inflight": set(),
    "attnd_build_info": {"version", "backend"},
}


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{label values}` -> value."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        ",".join((sample.name, *(sample.labels[key] for key in sorted(sample.labels)))): (
            sample.value
        )
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def filled() -> Metrics:
    metrics = Metrics()
    metrics.build("1.2.3", "cpu")
    metrics.observe("decode", "ok", 0.002, Timings(0.001, 0.0002, 0.0, 0.0005, 0.0, 0.0001))
    metrics.observe("decode", "overloaded", 0.0001, None)
    metrics.rejected("overloaded")
    metrics.inflight(3)
    metrics.inflight(-1)
    metrics.appended(5)
    metrics.kv_read(1000, 400, "cascade")
    metrics.batch(17)
    metrics.out_of_pages()
    metrics.pool(PoolNumbers(free=30, referenced=10, sequences=4, nodes=2))
    return metrics


def test_every_metric_has_its_name_and_labels() -> None:
    body = filled().render()[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    for name, labels in LABELS.items():
        assert name in families, name
        told = set(families[name].samples[0].labels) - {"le"}
        assert told == labels, name
        assert families[name].documentation, name
    assert "process_resident_memory_bytes" in families


def test_events_are_counted_in_base_units() -> None:
    told = samples(filled())
    wanted = {
        "attnd_requests_total,ok,decode": 1,
        "attnd_requests_total,overloaded,decode": 1,
        "attnd_request_duration_seconds_count,decode": 2,
        "attnd_request_duration_seconds_sum,decode": 0.0021,
        "attnd_queue_duration_seconds_sum": 0.001,
        "attnd_stage_duration_seconds_sum,kernel": 0.0005,
        "attnd_stage_duration_seconds_count,copy_in": 0,
        "attnd_batch_rows_sum": 17,
        "attnd_tokens_appended_total": 5,
        "attnd_kv_pages,free": 30,
        "attnd_kv_pages,referenced": 10,
        "attnd_kv_cache_usage_ratio": 0.25,
        "attnd_sequences": 4,
        "attnd_prefix_nodes": 2,
        "attnd_kv_bytes_read_total": 1000,
        "attnd_kv_bytes_saved_total": 400,
        "attnd_cascade_batches_total,cascade": 1,
        "attnd_cascade_batches_total,flat": 0,
        "attnd_out_of_pages_total": 1,
        "attnd_rejected_total,overloaded": 1,
        "attnd_rejected_total,deadline_exceeded": 0,
        "attnd_inflight": 2,
        "attnd_build_info,cpu,1.2.3": 1,
    }
    for key, value in wanted.items():
        assert abs(told[key] - value) < 1e-9, (key, told[key], value)


def test_two_services_in_one_process_count_apart() -> None:
    assert samples(filled())["attnd_tokens_appended_total"] == 5
    assert samples(Metrics())["attnd_tokens_appended_total"] == 0
