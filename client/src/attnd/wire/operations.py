"""The operations of the service, shared with its clients: their numbers and routes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ROUTES: Final[Mapping[str, tuple[int, str, str]]] = {
    "create_sequences": (1, "POST", "/v1/sequences"),
    "list_sequences": (2, "GET", "/v1/sequences"),
    "get_sequence": (3, "GET", "/v1/sequences/{id}"),
    "delete_sequence": (4, "DELETE", "/v1/sequences/{id}"),
    "truncate": (5, "POST", "/v1/sequences/{id}/truncate"),
    "page_table": (6, "POST", "/v1/page-table"),
    "append": (7, "POST", "/v1/append"),
    "gather": (8, "POST", "/v1/gather"),
    "decode": (9, "POST", "/v1/decode"),
    "prefill": (10, "POST", "/v1/prefill"),
    "ragged_prefill": (11, "POST", "/v1/ragged-prefill"),
    "cascade": (12, "POST", "/v1/cascade"),
    "merge": (13, "POST", "/v1/merge"),
    "info": (14, "GET", "/v1/info"),
    "pool": (15, "GET", "/v1/pool"),
    "match_prefix": (16, "POST", "/v1/prefix/match"),
    "commit": (17, "POST", "/v1/sequences/{id}/commit"),
    "renew_lease": (18, "POST", "/v1/leases/{id}"),
    "release_lease": (19, "DELETE", "/v1/leases/{id}"),
    "pin": (20, "PUT", "/v1/prefix/pin"),
    "unpin": (21, "DELETE", "/v1/prefix/pin"),
    "evict": (22, "POST", "/v1/prefix/evict"),
    "clear": (23, "POST", "/v1/prefix/clear"),
    "get_namespace": (24, "GET", "/v1/namespaces/{name}"),
    "set_namespace": (25, "PUT", "/v1/namespaces/{name}"),
    "delete_sequences": (26, "POST", "/v1/sequences/delete"),
    "events": (27, "GET", "/v1/events/page"),
    "export_sequence": (28, "POST", "/v1/sequences/{id}/export"),
    "import_sequence": (29, "POST", "/v1/sequences/{id}/import"),
    "get_import": (30, "GET", "/v1/sequences/{id}/import"),
    "cancel_import": (31, "DELETE", "/v1/sequences/{id}/import"),
    "engines": (32, "GET", "/v1/engines"),
    "snapshot": (33, "GET", "/v1/snapshot"),
    "drain_engine": (36, "POST", "/v1/engines/{name}/drain"),
    "list_namespaces": (37, "GET", "/v1/namespaces"),
    "holds": (38, "GET", "/v1/prefix/holds"),
    "truncate_sequences": (39, "POST", "/v1/sequences/truncate"),
    "commit_sequences": (40, "POST", "/v1/sequences/commit"),
    "prefetch": (41, "POST", "/v1/prefix/prefetch"),
    "contains_records": (50, "POST", "/v1/records/contains"),
    "put_records": (51, "POST", "/v1/records/put"),
    "get_records": (52, "POST", "/v1/records/get"),
    "touch_records": (53, "POST", "/v1/records/touch"),
    "delete_records": (54, "POST", "/v1/records/delete"),
    "clear_records": (55, "POST", "/v1/records/clear"),
    "release_records": (56, "DELETE", "/v1/records/jobs/{id}"),
}
"""Number in the road's frames, which never changes, HTTP's method, and the path: `{id}` is the
field of that name."""
