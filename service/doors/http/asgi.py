"""The HTTP door in a process of any ASGI server, beside a service without keys:

ATTND_SERVER__SOCKET=PATH uvicorn --factory service.doors.http.asgi:application
"""

from __future__ import annotations

import os
from typing import Final

from config.settings import load_settings
from service.doors.http.application import Application
from service.doors.kit.process import Setup
from service.keys import KeysError
from service.metrics import Metrics

NAME: Final = "http-asgi"
"""The process's name in its metrics, and for the engine."""


def application() -> Application:
    """The door of the service at `server.socket`, with the settings of the environment.

    Raises SettingsError, and KeysError for a service with keys.
    """
    settings = load_settings([])
    if settings.auth.keys_file is not None:
        raise KeysError("auth.keys_file: only HTTP processes that the service starts know keys")
    path = settings.server.socket or ""
    setup = Setup(settings, Metrics(NAME), path, NAME, secret="")
    return Application(setup, on_failed=lambda: os._exit(1))
