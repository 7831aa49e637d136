"""Clients of plain HTTP: they load no authorities, which takes longer than most tests."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from tests.harness.waiting import WAIT_S


def http_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.Client:
    return httpx.Client(base_url=url, headers=headers, timeout=WAIT_S, verify=False)


def status_of(url: str) -> int:
    """The status of a GET on a connection of its own."""
    return httpx.get(url, timeout=WAIT_S, verify=False).status_code
