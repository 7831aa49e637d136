"""Every setting of the service: what it is, why one would change it, and what it may be.

`config/default.yaml` < `--config FILE` < environment (`ATTND_POOL__NUM_PAGES=64`) < command line
(`--pool.num-pages 64`). An unknown key or a value out of range is a `SettingsError` that names it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

DEFAULTS: Final = Path(__file__).with_name("default.yaml")
DEFAULT_NUM_PAGES: Final = 512
ENV_PREFIX: Final = "ATTND_"
MAX_SLOTS: Final = 2**31 - 1
"""Token slots are int32: num_pages * page_size may not pass this."""

# Kubernetes gives every container the addresses of the services beside it, under their names: in a
# namespace with a service called `attnd` these appear by themselves and are no settings of ours.
SERVICE_LINK: Final = re.compile(r"ATTND_(SERVICE_(HOST|PORT)|PORT)(_[A-Z0-9_]*)?")


class SettingsError(ValueError):
    """The service cannot start with these settings; the message is one line and names the key."""


class Section(BaseModel):
    """A group of settings: frozen, and without room for a key it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class PoolSettings(Section):
    """The page pool: its shape must be the model's, its size is what the machine can give."""

    num_layers: Annotated[int, Field(ge=1, le=4096)] = 4
    """The model's attention layers; each has its own K and V for every page."""

    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] = 8
    """The model's KV heads (per service, when heads are split over several)."""

    head_dim: Annotated[int, Field(ge=1, le=1024)] = 128
    """The model's dimension per head."""

    page_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per page. Larger pages copy faster and plan cheaper; smaller ones waste fewer slots at
    the end of a sequence and share prefixes at a finer grain. 16 to 64 are tuned for."""

    num_pages: Annotated[int | None, Field(ge=1)] = None
    """Pages to allocate, for an exact size; with neither this nor memory_fraction, 512."""

    memory_fraction: Annotated[float | None, Field(gt=0.0, le=0.95)] = None
    """Share of the memory that is free at start (the GPU's, or the host's on the CPU backend) to
    give to the pool. Use it in production, where the pool should take what is there."""

    layout: Literal["NHD", "HND"] = "NHD"
    """Order inside a page: tokens before heads (NHD) or heads before tokens (HND). Change it to
    share the pool's bytes with a library that wants the other."""

    dtype: Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"] = "fp16"
    """Storage type of K and V. fp8 halves the memory and the traffic, at some accuracy."""

    k_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """fp8 only: a stored K times this is the real K. Set it so that the model's largest K fits."""

    v_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """fp8 only: a stored V times this is the real V."""

    @model_validator(mode="after")
    def check_together(self) -> PoolSettings:
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ValueError("give pool.num_pages or pool.memory_fraction, not both")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale != 1.0 and not self.dtype.startswith("fp8"):
                raise ValueError(f"pool.{name} = {scale}: only fp8 pools have scales")
        if self.num_pages is not None and self.num_pages * self.page_size > MAX_SLOTS:
            raise ValueError(
                f"pool.num_pages = {self.num_pages}: times page_size passes 2**31 - 1 slots"
            )
        return self


class BackendSettings(Section):
    """Which implementation of the kernels runs, and where."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes cuda when CuPy is installed and sees a GPU, else cpu. Name one to fail at start
    instead of falling back."""

    device: Annotated[int, Field(ge=0, le=255)] = 0
    """Index of the GPU, when a machine has several; one service owns one GPU."""

    @model_validator(mode="after")
    def check_device(self) -> BackendSettings:
        if self.kind == "cpu" and self.device != 0:
            raise ValueError(f"backend.device = {self.device}: the cpu backend has only device 0")
        return self


class ServerSettings(Section):
    """Where the service listens, and how much it takes on."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 inside a container."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port; 0 lets the system choose one."""

    uds: Annotated[str | None, Field(min_length=1)] = None
    """Path of a Unix socket to listen on in place of host and port, for a scheduler on the same
    machine: it saves the TCP stack."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**20
    """Largest request body. Raise it for prefills of more tokens at once; it bounds the memory one
    request can take."""

    queue_depth: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Operations that may wait for the worker; one more is answered 429. Deeper queues ride out
    bursts, shallower ones push back sooner."""

    deadline_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds an operation may wait for its turn when its request names no deadline; then 504."""

    drain_timeout_s: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that a stopping service gives admitted work; keep it below the supervisor's own."""


class LogSettings(Section):
    """What is written to standard error."""

    format: Literal["console", "json"] = "console"
    """`console` for people, `json` (one object a line) for log collectors."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""


class Settings(BaseSettings):
    """attnd: attention and KV cache as a service."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        cli_prog_name="attnd",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    pool: PoolSettings = PoolSettings()
    backend: BackendSettings = BackendSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    config: Path | None = None
    """A YAML file laid over the defaults."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # the command line goes before these by itself; `load_settings` hands the YAML in
        return (env_settings, init_settings)


def let_idle_threads_sleep() -> None:
    """Call before torch is imported: its OpenMP threads, which would spin between operations and
    so take the cores from the event loop, sleep instead. What the environment says goes first."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def load_settings(argv: Sequence[str] = ()) -> Settings:
    """Settings from YAML, environment and command line; `--help` prints them all and exits.

    Raises `SettingsError`, one line that names the key.
    """
    refuse_unknown_environment()
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--config", default=os.environ.get(f"{ENV_PREFIX}CONFIG"))
    config = scan.parse_known_args(list(argv))[0].config
    values = read_yaml(DEFAULTS)
    if config is not None:
        values = lay_over(values, read_yaml(Path(config)), config)
    try:
        return CliApp.run(Settings, list(argv), cli_exit_on_error=False, **values)
    except ValidationError as error:
        raise SettingsError(one_line(error)) from error
    except SourceError as error:
        raise SettingsError(" ".join(str(error).split())) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of one YAML file; an empty file has none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: not a mapping of sections (pool, backend, server, log)")
    for name, section in values.items():
        if not isinstance(section, dict):
            raise SettingsError(f"{path}: {name} = {section}: not a section of settings")
    return values


def lay_over(below: dict[str, Any], above: dict[str, Any], path: str) -> dict[str, Any]:
    """`above` wins, key by key inside each section."""
    unknown = sorted(set(above) - set(below), key=str)
    if unknown:
        raise SettingsError(f"{path}: {unknown[0]}: unknown section (one of {', '.join(below)})")
    return {name: {**section, **above.get(name, {})} for name, section in below.items()}


def refuse_unknown_environment() -> None:
    """An ATTND_ variable that would set nothing is a slip (one underscore for two, say)."""
    known = {f"{ENV_PREFIX}CONFIG"}
    for section, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            known |= {
                f"{ENV_PREFIX}{section}__{key}".upper() for key in field.annotation.model_fields
            }
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known and not SERVICE_LINK.fullmatch(name):
            raise SettingsError(
                f"{name}: unknown setting in the environment (write ATTND_SECTION__KEY, "
                "as in ATTND_POOL__NUM_PAGES)"
            )


def one_line(error: ValidationError) -> str:
    """`pool.page_size = 0: Input should be greater than or equal to 1; …`."""
    return "; ".join(
        describe(
            ".".join(map(str, problem["loc"])), problem["type"], problem["input"], problem["msg"]
        )
        for problem in error.errors()
    )


def describe(key: str, kind: str, value: object, message: str) -> str:
    """One problem, with the key and the value it is about."""
    match kind:
        case "value_error":  # ours: it names its key already
            return message.removeprefix("Value error, ")
        case "extra_forbidden":
            return f"{key}: unknown setting"
        case "missing":
            return f"{key}: missing"
        case _:
            return f"{key} = {value}: {message}"
