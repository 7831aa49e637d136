"""Fixtures of the gateway: one in front of the tests' service, and tritonclient at it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from http_service import Service
from triton_callers import Gateway, Triton, gateway_of


@pytest.fixture(scope="module")
def gateway(service: Service) -> Iterator[Gateway]:
    with gateway_of(service) as running:
        yield running


@pytest.fixture
def v2(gateway: Gateway, client: httpx.Client) -> Iterator[httpx.Client]:
    """Plain HTTP to the gateway; sequences are deleted."""
    with httpx.Client(base_url=gateway.url, timeout=60.0) as made:
        yield made


@pytest.fixture
def over_http(gateway: Gateway, client: httpx.Client) -> Iterator[Triton]:
    """tritonclient over HTTP; its sequences are deleted."""
    with gateway.http() as made:
        yield made


@pytest.fixture
def over_grpc(gateway: Gateway, client: httpx.Client) -> Iterator[Triton]:
    """tritonclient over gRPC; its sequences are deleted."""
    with gateway.grpc() as made:
        yield made


@pytest.fixture(params=["over_http", "over_grpc"])
def triton(request: pytest.FixtureRequest) -> Triton:
    """tritonclient over either protocol."""
    made: Triton = request.getfixturevalue(request.param)
    return made
