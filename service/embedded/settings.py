"""Settings of an embedded engine, from a mapping, and those that it cannot have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from config.settings import Settings, SettingsError, load_settings

NAME: Final = re.compile(r"config|[a-z]+\.[a-z0-9_-]+")
OF_DOORS: Final = {
    "server": ("socket", "tls_cert"),
    "oip": ("http_port", "grpc_port"),
    "cache": ("zmq_endpoint",),
}
"""Settings of doors, which an embedded engine has with `serve_port` only."""


def settings_of(given: Mapping[str, object], serve_port: int | None, has_cuda: bool) -> Settings:
    """The settings by name, `{"pool.num-layers": 32}`, over those of the file `config` and of the
    environment. `has_cuda`: whether this process can use a CUDA device.

    Raises `SettingsError`, a ValueError that names the setting, its value, and the rule.
    """
    argv = [f"--{name}={written(value)}" for name, value in given.items() if is_setting(name)]
    settings = load_settings([*argv, f"--server.port={serve_port or 0}"])
    if settings.cluster.engines != 1:
        rule = "an embedded engine is one, on one device: run `attnd serve` for a cluster"
        raise SettingsError(f"cluster.engines = {settings.cluster.engines}: {rule}")
    if settings.server.uds is not None:
        remedy = "the doors of an embedded engine listen on the port serve_port: leave it out"
        raise SettingsError(f"server.uds = {settings.server.uds}: {remedy}")
    if serve_port is None:
        for section, names in OF_DOORS.items():
            for name in names:
                if (value := getattr(getattr(settings, section), name)) is not None:
                    rule = "without serve_port there are no doors: give it, or leave this out"
                    raise SettingsError(f"{section}.{name} = {value}: {rule}")
    kind = settings.backend.kind
    if kind == "cuda" and not has_cuda:
        rule = "torch has no CUDA device in this process: install torch with CUDA, or set cpu"
        raise SettingsError(f"backend.kind = cuda: {rule}")
    if kind == "auto":
        chosen = {"kind": "cuda" if has_cuda else "cpu"}
        backend = settings.backend.model_copy(update=chosen)
        settings = settings.model_copy(update={"backend": backend})
    return settings


def is_setting(name: object) -> bool:
    """True. Raises `SettingsError` for what is no setting's name, and for `server.port`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingsError(f"{name!r}: expected a setting's name, as in 'pool.num-layers'")
    if name == "server.port":
        raise SettingsError(
            "server.port: an embedded engine's doors listen on serve_port: give that"
        )
    return True


def written(value: object) -> str:
    """A value as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(list(value)) if isinstance(value, (list, tuple)) else str(value)
