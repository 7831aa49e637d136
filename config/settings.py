"""Loads the settings from their sources; errors are one line.

`config/default.yaml` < `--config FILE` < environment (`ATTND_POOL__NUM_PAGES=64`) < command line
(`--pool.num-pages 64`). An unknown key or a value out of range raises a `SettingsError` that names
it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from config.section import Section
from config.sections import (
    DEFAULT_NUM_PAGES,
    MAX_SLOTS,
    AuthSettings,
    BackendSettings,
    EngineSettings,
    LogSettings,
    PoolSettings,
    Settings,
)
from config.server import ServerSettings
from config.wording import closest, fields_of, hint, place_of, rule_of

__all__ = (
    "DEFAULT_NUM_PAGES",
    "MAX_SLOTS",
    "AuthSettings",
    "BackendSettings",
    "EngineSettings",
    "LogSettings",
    "PoolSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "device_queues",
    "load_settings",
    "set_cupy_cache",
    "set_environment",
)

MOVED: Final = {
    "server.grpc_port": "oip.grpc_port",
    "server.grpc_max_calls": "oip.max_calls",
    "server.grpc_max_message_bytes": "oip.max_message_bytes",
}
"""The successors of settings that have gone."""
DEFAULTS: Final = Path(__file__).with_name("default.yaml")
ENV_PREFIX: Final = "ATTND_"

# Kubernetes sets variables with the addresses of the services of a namespace: a service called
# `attnd` makes these, which are not settings.
SERVICE_LINK: Final = re.compile(r"ATTND_(SERVICE_(HOST|PORT)|PORT)(_[A-Z0-9_]*)?")

ON_RAY: Final = "several hosts are Ray's: start one service with --cluster (docs/cluster.md)"
REMOVED: Final = {
    "server.max_json_bytes": "a JSON body has at most 512 KiB: send more as safetensors",
    "cluster.members": ON_RAY,
    "cluster.listen": ON_RAY,
    "cluster.secret_file": "each start makes a secret of its own: leave it out",
    "cluster.lost_after_s": "an engine is dead when its process ends or Ray says so: leave it out",
    "cluster.ingresses": "a cluster has one router: run two clusters for twice the throughput",
    "server.max_header_count": "server.max_header_bytes limits headers: leave it out",
}
"""Settings of earlier versions, and what to do instead."""

SECTIONS: Final[dict[str, type[Section]]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


class SettingsError(ValueError):
    """The service cannot start with these settings; the message is one line and names the key."""


class Sources(BaseSettings, Settings):
    """The settings from the environment and the command line; YAML values are arguments."""

    __doc__ = Settings.__doc__

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        cli_prog_name="attnd serve",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # the command line precedes these by default; `load_settings` passes the YAML values
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {
                name.replace("-", "_"): value for name, value in env_settings.env_vars.items()
            }
        return (env_settings, init_settings)


ENVIRONMENT: Final = {
    # Idle threads sleep: spinning, they would take cores from the event loop.
    "torch": {"OMP_WAIT_POLICY": "passive"},
    # The core does not write to standard error.
    "grpc": {"GRPC_VERBOSITY": "NONE"},
    # No usage reports, no changes to the visible GPUs of actors without GPUs, no colours.
    "ray": {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_COLOR_PREFIX": "0",
    },
    # Each stream has its own hardware queue and kernels load at start, so that a stream that waits
    # for its caller blocks no other.
    "cuda": {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"},
}
"""Variables of the environment by the library that reads them."""


CUPY_CACHE: Final = "CUPY_CACHE_DIR"
SPARE_CACHE: Final[list[TemporaryDirectory[str]]] = []
"""The directory is removed at the exit."""


def set_environment(*libraries: str) -> None:
    """Set variables that libraries read when they are imported or the device is first used, unless
    the environment has them."""
    for library in libraries:
        for name, value in ENVIRONMENT[library].items():
            os.environ.setdefault(name, value)


def set_cupy_cache() -> None:
    """Give CuPy a temporary directory for its kernels where it cannot make its own, as for a user
    without a home (its import would fail there, or make a directory named `~`), or where another
    user can write to it."""
    if find_spec("cupy") is None:
        return
    own = os.path.expanduser(os.environ.get(CUPY_CACHE, "~/.cupy/kernel_cache"))
    with suppress(OSError):
        if not own.startswith("~"):
            os.makedirs(own, exist_ok=True)
            found = os.stat(own)
            is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o002
            if is_own and os.access(own, os.W_OK):
                return
    SPARE_CACHE.append(TemporaryDirectory(prefix="attnd-cupy-"))
    os.environ[CUPY_CACHE] = SPARE_CACHE[-1].name


def device_queues() -> int:
    """Number of a CUDA device's hardware queues: the environment's value, or the driver's 8."""
    return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 8)


def load_settings(argv: Sequence[str] = ()) -> Settings:
    """Settings from YAML, environment and command line; `--help` prints them all and exits.

    Raises `SettingsError`, one line that names the key.
    """
    refuse_unknown_environment()
    argv = [dashed(argument) for argument in argv]
    refuse_unknown_options(argv)
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--config", default=os.environ.get(f"{ENV_PREFIX}CONFIG"))
    config = scan.parse_known_args(argv)[0].config
    values = read_yaml(DEFAULTS)
    if config is not None:
        values = override(values, read_yaml(Path(config)), config)
    try:
        source = Options(Sources, cli_exit_on_error=False)
        found = CliApp.run(Sources, argv, cli_settings_source=source, **values)
    except ValidationError as error:
        raise SettingsError(one_line(error, values, config)) from error
    except SourceError as error:
        refuse_broken_lists()
        detail = " ".join(str(error).split()).removeprefix("error parsing CLI: ")
        raise SettingsError(f"{detail}: --help lists all options") from error
    return Settings.model_construct(**dict(found))


class Options(CliSettingsSource[Sources]):
    """The command line; its help names types in words."""

    def _metavar_format(self, obj: Any) -> str:
        if get_origin(obj) is tuple:
            kind = get_args(obj)[0]
            return f"{(get_args(kind) or (kind,))[0].__name__},..."
        name: str = super()._metavar_format(obj)
        return name

    def _help_format(self, *about: Any) -> str:
        text: str = super()._help_format(*about)
        return re.sub(r"\(default: (None|\(\))\)", "(default: none)", text)


def dashed(argument: str) -> str:
    """An option with dashes in place of underscores: `--pool.num-pages=64`."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def refuse_unknown_options(argv: Sequence[str]) -> None:
    """Raises `SettingsError` for an unknown option, with the most similar known one."""
    for argument in argv:
        name, _, _ = argument.partition("=")
        section, _, key = name.removeprefix("--").partition(".")
        if not name.startswith("--") or name in ("--config", "--help"):
            continue
        refuse_removed(f"{section}.{key}", name)
        keys = [one.replace("_", "-") for one in fields_of(SECTIONS.get(section)) or {}]
        if section not in SECTIONS:
            close = hint(section, [*SECTIONS, "config", "help"], "sections")
        elif (moved := MOVED.get(f"{section}.{key}".replace("-", "_"))) is not None:
            raise SettingsError(f"{name}: has gone: set --{moved.replace('_', '-')} instead")
        elif key and key not in keys:
            close = hint(key, keys, "settings", f"--{section}.")
        else:
            continue
        raise SettingsError(f"{name}: unknown option{close} (--help lists all options)")


def refuse_removed(key: str, given: str) -> None:
    """Raises `SettingsError` for a setting of an earlier version, with its successor."""
    if (successor := REMOVED.get(key.lower().replace("-", "_"))) is not None:
        raise SettingsError(f"{given}: this setting was removed: {successor}")


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice in a mapping; YAML's readers keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                where = f"line {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"{where}: {key.value}: given twice: remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of one YAML file, keys with underscores; an empty file has none.

    A setting can be in its section or have its full name, `pool.num_pages: 64`.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: not a mapping of sections ({', '.join(SECTIONS)})")
    found: dict[str, Any] = {}
    for name, section in values.items():
        head, dot, key = str(name).partition(".")
        given = {key: section} if dot else section
        if not isinstance(given, dict):
            raise SettingsError(f"{path}: {name} = {section}: not a section of settings")
        for key, value in given.items():
            key = str(key).replace("-", "_")
            if key in found.setdefault(head, {}):
                raise SettingsError(f"{path}: {head}.{key}: given twice, in two spellings")
            refuse_removed(f"{head}.{key}", f"{path}: {head}.{key}")
            found[head][key] = value
        found.setdefault(head, {})
    return found


def override(below: dict[str, Any], above: dict[str, Any], path: str) -> dict[str, Any]:
    """The sections of `below`, overridden key by key by the sections of `above`."""
    unknown = sorted(set(above) - set(below), key=str)
    if unknown:
        close = hint(unknown[0], below, "sections")
        raise SettingsError(f"{path}: {unknown[0]}: unknown section{close}")
    return {name: {**section, **above.get(name, {})} for name, section in below.items()}


def refuse_unknown_environment() -> None:
    """Raises `SettingsError` for an unknown ATTND_ variable, which is usually a misspelling."""
    known = {f"{ENV_PREFIX}CONFIG"}
    for name, section in SECTIONS.items():
        known |= {f"{ENV_PREFIX}{name}__{key}".upper() for key in section.model_fields}
    for name in sorted(os.environ):
        spelled = name.replace("-", "_")
        refuse_removed(spelled.removeprefix(ENV_PREFIX).replace("__", "."), name)
        if (
            name.startswith(ENV_PREFIX)
            and spelled not in known
            and not SERVICE_LINK.fullmatch(name)
        ):
            moved = MOVED.get(spelled.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1))
            if moved is not None:
                successor = f"{ENV_PREFIX}{moved.replace('.', '__')}".upper()
                raise SettingsError(f"{name}: has gone: set {successor} instead")
            close = closest(name, sorted(known))
            raise SettingsError(
                f"{name}: unknown setting in the environment"
                + (f": did you mean {close}?" if close else "")
                + " (write ATTND_SECTION__KEY, as in ATTND_POOL__NUM_PAGES)"
            )


def refuse_broken_lists() -> None:
    """Raises `SettingsError` for a variable of the environment that is a list, and not in JSON."""
    for section, settings in SECTIONS.items():
        for key, field in settings.model_fields.items():
            name = f"{ENV_PREFIX}{section}__{key}".upper()
            if get_origin(field.annotation) is not tuple or name not in os.environ:
                continue
            try:
                json.loads(os.environ[name])
            except ValueError:
                rule = 'must be a list in JSON, as ["a", "b"]'
                raise SettingsError(f"{name} = {os.environ[name]}: {rule}") from None


def one_line(error: ValidationError, values: dict[str, Any], config: str | None) -> str:
    """`FILE: pool.page_size = 0: must be at least 1; …`: `values` of the files, of which the one
    at `config`, if any, is named where a wrong value is from there."""

    def where(problem: Any) -> str:
        name, key = (*problem["loc"], None, None)[:2]
        section = values.get(name)
        given = section.get(key, problem) if isinstance(section, dict) else problem
        return f"{config}: " if config and problem["input"] is given else ""

    problems = error.errors(include_url=False)
    return "; ".join(where(problem) + describe(problem) for problem in problems)


def describe(problem: Any) -> str:
    """One problem: key, value, and the rule or the remedy."""
    key, owner = place_of(Settings, problem["loc"])
    kind, value = problem["type"], problem["input"]
    rule = rule_of(problem)
    if kind == "value_error":  # raised by a validator of a section: it names its key
        return rule
    if key in MOVED:
        return f"{key}: has gone: set {MOVED[key]} instead"
    if kind == "extra_forbidden":
        names = () if owner is None else tuple(owner.model_fields)
        return f"{key}: unknown setting{hint(key.rpartition('.')[2], names, 'settings')}"
    if key in SECTIONS:
        return f"{key} = {value}: a section, not a setting: write --{key}.KEY, one of " + ", ".join(
            SECTIONS[key].model_fields
        )
    if key.endswith("_bytes") and kind == "int_parsing":
        rule = "must be an integer, or a number with a unit, such as 4GiB"
    return f"{key} = {value}: {rule}"
