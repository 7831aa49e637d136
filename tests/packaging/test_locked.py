"""Locked packages of the image, extras, and `make run`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from service.extras import EXTRAS, how_to_install

ROOT: Final = Path(__file__).resolve().parents[2]
LOCKED: Final = ("base", "cuda", "cuda12", "oip", "zmq", "otel", "ray")


def project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def test_a_missing_extra_is_named_by_packages_that_an_index_has() -> None:
    for extra, packages in EXTRAS.items():
        wanted = project()["optional-dependencies"][extra]
        assert [re.split("[<>=]", one)[0] for one in wanted] == list(packages), extra
        remedy = how_to_install(extra)
        assert f"'.[{extra}]'" in remedy and all(name in remedy for name in packages)
        assert "attnd[" not in remedy, "no index has attnd"


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a file of deploy/locked."""
    text = (ROOT / f"deploy/locked/{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text, "a host does not belong there"
    found = {}
    for entry in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines():
        pin, *hashes = entry.split()
        package, _, version = pin.partition("==")
        found[package] = version, hashes
    return found


@pytest.mark.parametrize("name", LOCKED)
def test_every_package_of_the_image_has_a_version_and_hashes(name: str) -> None:
    entries = locked(name)
    assert entries
    for package, (version, hashes) in entries.items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*(\+cpu)?", version), f"{package}: {version}"
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), package


def test_the_image_has_every_dependency_in_the_version_of_the_tests() -> None:
    wanted = {"base": project()["dependencies"], **project()["optional-dependencies"]}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for name in LOCKED:
        entries = {**locked("base"), **locked(name)}
        for requirement in wanted[name]:
            package = re.split(r"[^\w-]", requirement)[0].replace("_", "-")
            assert package in entries, f"{name}: {package}: run make lock"
            version = entries[package][0].removesuffix("+cpu")
            assert version == pins.get(package, version), f"{package}: run make lock"


def test_extras_of_one_image_agree_on_every_version() -> None:
    for package in set().union(*map(locked, LOCKED)):
        one = {file[package][0] for name in LOCKED if package in (file := locked(name))}
        cuda = {"cuda", "cuda12"} & {name for name in LOCKED if package in locked(name)}
        assert len(one) == 1 or cuda, f"{package}: {one}"
