"""Keys: their file, its errors, and the tenant of a key."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from config.sections import AuthSettings, Settings
from service import keys
from service.errors import Forbidden, Unauthorized
from service.keys import KeysError, line_of, new_key, read_again, read_keys
from service.processes.handover import CheckedFiles
from service.tenants import OPEN, tenant_of
from tests.harness.processes import SERVICE, run

DIGEST = hashlib.sha256(b"secret").hexdigest()


def file_of(directory: Path, *lines: str) -> str:
    path = directory / "keys"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_line_is_a_digest_a_namespace_and_scopes(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        "# whose keys these are",
        "",
        f"{DIGEST} search read,append  # rotated in spring",
        line_of("other", "chat", ["admin"]),
    )
    found = read_keys(path)
    assert found.check(b"secret", "") == found.by_digest[bytes.fromhex(DIGEST)]
    assert found.check(b"secret", "").tenant is tenant_of("search", ["append", "read"])
    assert found.check(b"other", "").tenant.scopes == {"admin"}


def test_a_file_that_every_user_can_change_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, f"{DIGEST} search read")
    os.chmod(path, 0o646)
    with pytest.raises(KeysError, match="others can write to it: chmod o-w it"):
        read_keys(path)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("secret search read", "64 hexadecimal digits"),
        (f"{DIGEST} search", "2 fields, expected 3"),
        (f"{DIGEST} search read append", "4 fields, expected 3"),
        (f"{DIGEST} a/b read", "namespace 'a/b'"),
        (f"{DIGEST} {'n' * 65} read", "1 to 64 characters"),
        (f"{DIGEST} search read,write", "scope 'write': expected one of read, append, admin"),
        (f"{DIGEST} search read,", "scope ''"),
        (f"{DIGEST} one read\n{DIGEST} two read", "line 2: duplicate key"),
        ("# none", "no keys in it"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_the_line_and_without_the_key(
    tmp_path: Path, line: str, rule: str
) -> None:
    with pytest.raises(KeysError) as refused:
        read_keys(file_of(tmp_path, line))
    text = str(refused.value)
    assert rule in text and str(tmp_path) in text and "\n" not in text
    assert "secret" not in text, "an operator who writes the key itself must not find it in the log"


def test_a_file_has_keys_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    lines = [line_of(name, "a", ["read"]) for name in ("one", "two", "three")]
    assert len(read_keys(file_of(tmp_path, *lines[:2])).by_digest) == 2
    with pytest.raises(KeysError, match="3 keys, the limit is 2"):
        read_keys(file_of(tmp_path, *lines))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"auth.keys_file .*none: No such file .*: name a file"):
        read_keys(str(tmp_path / "none"))


def test_every_key_of_many_is_found_by_its_digest(tmp_path: Path) -> None:
    names = [f"key-{number}" for number in range(20)]
    keys = read_keys(file_of(tmp_path, *(line_of(name, name, ["read"]) for name in names)))
    for name in names:
        assert keys.check(name.encode(), "").tenant.namespace == name
    for shown in (b"key-20", b"x" * 10_000, b"", bytes.fromhex(DIGEST)):
        assert keys.find(shown) is None


def test_a_key_that_is_unknown_or_missing_is_refused_with_the_remedy(tmp_path: Path) -> None:
    keys = read_keys(file_of(tmp_path, f"{DIGEST} search read"))
    with pytest.raises(Unauthorized, match="requires a key: show it"):
        keys.check(b"", "show it")
    with pytest.raises(Unauthorized, match="unknown or revoked"):
        keys.check(b"Secret", "")


def test_a_file_that_has_become_unusable_leaves_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auth = AuthSettings(keys_file=file_of(tmp_path, f"{DIGEST} search read"))
    before = read_again(auth, None)
    assert before is not None
    file_of(tmp_path, "half a line")
    assert read_again(auth, before) is before
    assert "the keys are unchanged" in caplog.text


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o660, 1)])
def test_a_key_file_that_others_can_read_or_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: int
) -> None:
    path = file_of(tmp_path, f"{DIGEST} search read")
    os.chmod(path, mode)
    os.close(CheckedFiles(Settings(auth=AuthSettings(keys_file=path))).fd)
    assert caplog.text.count(f"{path} has mode {mode:04o}: others can read or change it") == warned


def test_a_missing_scope_is_reported_with_the_keys_scopes() -> None:
    reader = tenant_of("search", ["read"])
    with pytest.raises(
        Forbidden, match="append requires the scope append, this key has read"
    ) as no:
        reader.require("append", "append")
    assert no.value.extra == {"scope": "append"}
    reader.require("read", "decode")
    operator = tenant_of("ops", ["admin"])
    for scope in ("read", "append"):
        with pytest.raises(Forbidden, match="this key has admin"):
            operator.require(scope, "anything")
    OPEN.require("admin", "anything")


def test_a_scope_of_an_earlier_version_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = read_keys(file_of(tmp_path, f"{DIGEST} search read,move"))
    (key,) = keys.by_digest.values()
    assert key.tenant.scopes == {"read"}
    assert "has the scope move, which was removed: it is ignored" in caplog.text
    with pytest.raises(KeysError, match="no scope"):
        read_keys(file_of(tmp_path, f"{DIGEST} search move"))


def test_the_command_prints_a_key_and_its_line(tmp_path: Path) -> None:
    command = (*SERVICE, "key", "new", "--namespace")
    done = run(*command, "search", "--scope", "admin", "--scope", "read", check=True)
    key, line = done.stdout.splitlines()
    assert line == line_of(key, "search", ["read", "admin"])
    assert read_keys(file_of(tmp_path, line)).check(key.encode(), "").tenant.namespace == "search"
    wrong = run(*command, "a b")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("attnd: namespace 'a b'")


def test_no_two_keys_are_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("attnd_") and len(key) == 49 for key in made)
