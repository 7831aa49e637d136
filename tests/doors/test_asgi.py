"""The door in a plain uvicorn: the same answers, large bodies by `receive`, and hang-ups."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from scripted import SECRET, WAIT_S, decode_body, post, serving, wait_for

from config.settings import load_settings
from service.doors.http.asgi import application
from service.keys import KeysError, line_of, new_key, secret_of

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "uvicorn", "--factory", "service.doors.http.asgi:application")


@pytest.mark.long
def test_a_plain_uvicorn_serves_the_door(tmp_path: Path) -> None:
    key, path = new_key(), tmp_path / "http"
    (tmp_path / "keys").write_text(line_of(key, "red", ["read"]))
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    with serving(tmp_path) as running:
        assert running.engine.end is not None
        settings = {
            "ATTND_SERVER__SOCKET": str(running.engine.end.path),
            "ATTND_SERVER__SECRET_FILE": str(tmp_path / "secret"),
            "ATTND_AUTH__KEYS_FILE": str(tmp_path / "keys"),
        }
        environment = {**os.environ, **settings}
        command = (*COMMAND, "--uds", str(path), "--log-level", "warning")
        with subprocess.Popen(command, cwd=ROOT, env=environment) as server:
            try:
                transport = httpx.HTTPTransport(uds=str(path))
                with httpx.Client(transport=transport, base_url="http://attnd") as client:
                    wait_for(path.exists, "uvicorn")
                    wait_for(lambda: is_ready(client), "the engine")
                    assert post(client, "/v1/decode", decode_body()).status_code == 401
                    client.headers["authorization"] = f"Bearer {key}"
                    for rows in (1, 20_000, 1_000_000):
                        body = decode_body(rows)
                        assert post(client, "/v1/decode", body).content[-32:] == body[-32:]
                        assert running.engine.heard[-1].image == body
                    running.engine.close_gate()
                    with pytest.raises(httpx.ReadTimeout):
                        client.get("/v1/pool", timeout=0.3)
                wait_for(lambda: running.engine.cancelled, "the call to be taken back")
            finally:
                server.terminate()
                assert server.wait(WAIT_S) in (0, -15)


def is_ready(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/health/ready").is_success
    return False


def test_a_secret_is_long_and_for_the_service_s_user_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert secret_of(None) != secret_of(None)
    for text, mode, said in (("x" * 64, 0o644, "chmod 600"), ("x" * 31, 0o600, "31 characters")):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(KeysError, match=f"server.secret_file .*{said}"):
            secret_of(str(path))
    with pytest.raises(KeysError, match="name a readable file"):
        secret_of(str(tmp_path / "none"))
    path.write_text("x" * 32 + "\n")
    path.chmod(0o600)
    assert secret_of(str(path)) == "x" * 32


def test_the_factory_names_the_settings_that_it_needs() -> None:
    assert load_settings([]).server.secret_file is None
    with pytest.raises(ValueError, match=r"server.socket and server.secret_file"):
        application()
