"""Who may import what: the arrows between packages, read off every module's syntax tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
TREES: Final = ("service", "kernels", "config", "client/src")
STDLIB: Final = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True, slots=True)
class Use:
    """`file:line` imports module `name`, or reads the environment (`os.environ`, `os.getenv`)."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


@dataclass(frozen=True, slots=True)
class Arrow:
    """In `files` (globs over paths), uses for which `breaks` holds are refused."""

    rule: str
    files: tuple[str, ...]
    breaks: Callable[[str], bool]
    but: tuple[str, ...] = ()

    def covers(self, file: str) -> bool:
        return any(fnmatch(file, glob) for glob in self.files) and not any(
            fnmatch(file, glob) for glob in self.but
        )


def under(*packages: str) -> Callable[[str], bool]:
    """Whether a name is one of `packages` or inside one."""
    return lambda name: any(name == one or name.startswith(f"{one}.") for one in packages)


def beyond(*packages: str) -> Callable[[str], bool]:
    """Whether a name is neither the standard library's nor of `packages`."""
    allowed = under(*packages)
    return lambda name: name.split(".")[0] not in STDLIB and not allowed(name)


PRODUCT: Final = ("service/*", "kernels/*", "config/*", "client/*")
EXTRAS: Final = ("client/src/attnd/torch/*", "client/src/attnd/transformers/*")
"""Parts of the client that need torch."""
ADAPTERS: Final = tuple(f"client/src/attnd/{one}/*" for one in ("lmcache", "vllm", "sglang"))
"""Parts of the client that run inside a serving engine."""
ONLY: Final = {
    "xxhash": (
        *("service/tiers/index.py", "service/tiers/records.py", "kernels/digests.py"),
        "client/src/attnd/transformers/salt.py",
    ),
    "sqlite3": ("service/tiers/index.py",),
    "grpc google": ("service/gateway/*", "service/doors/kit/tls.py"),
    "attnd_service": ("client/src/attnd/torch/embedded.py",),
    "ray": ("service/cluster/ray/*",),
    "zmq msgspec": ("service/doors/zmq/*",),
    "service.cluster": ("service/cluster/*", "service/__main__.py"),
    "torch": ("kernels/cpu*", *EXTRAS, "client/src/attnd/sglang/*"),
    "cupy cupyx cuda": ("kernels/cuda*", "kernels/compile*"),
    "prometheus_client": ("service/metrics.py",),
    "opentelemetry": ("service/doors/kit/ledger.py",),
    "os.environ os.environb os.getenv os.getenvb": ("config/settings.py",),
}
"""Names that these modules alone use."""
ARROWS: Final = (
    Arrow(
        "service/core imports the standard library and numpy only",
        ("service/core/*",),
        beyond("numpy", "service.core"),
    ),
    Arrow(
        "kernels never imports service, config or the client",
        ("kernels/*",),
        under("service", "config", "attnd"),
    ),
    Arrow("config imports no package of the service", ("config/*",), under("service", "kernels")),
    Arrow(
        "the wire package imports the standard library, numpy and ml_dtypes only",
        ("client/src/attnd/wire/*",),
        beyond("numpy", "ml_dtypes", "attnd.wire"),
    ),
    Arrow(
        "the service imports of the client its wire package only",
        ("service/*", "config/*"),
        lambda name: under("attnd")(name) and not under("attnd.wire")(name),
        but=("service/gateway/*",),  # a caller of the service, by its client's transports
    ),
    Arrow(
        "the record store knows nothing of pages: the standard library and xxhash",
        ("service/tiers/*",),
        beyond("xxhash", "service.tiers", "service.trusted_paths"),
    ),
    Arrow(
        "images know numpy, JSON, the errors and nothing else",
        ("service/image/*",),
        beyond("numpy", "pydantic_core", "attnd.wire", "service.image", "service.errors"),
    ),
    Arrow(
        "operations are declared outside every protocol, without pool or threads",
        ("service/operations/*",),
        beyond(
            *("numpy", "pydantic", "attnd.wire", "service.operations", "service.image"),
            *("service.errors", "service.tenants"),
        ),
    ),
    Arrow(
        "operations have no threads",
        ("service/operations/*", "service/image/*"),
        under("threading", "concurrent", "asyncio", "multiprocessing"),
    ),
    Arrow(
        "the road knows neither its engine nor its doors",
        ("service/road/*",),
        beyond(
            *("numpy", "attnd.wire", "service.road", "service.image"),
            *("service.errors", "service.keys", "service.tenants", "service.trusted_paths"),
            *("pydantic", "config.wording"),
        ),
    ),
    Arrow(
        "the engine's layers, the lowest first: work, store, tiers, handlers, loop",
        ("service/engine/work/*",),
        lambda name: under("service.engine")(name) and not under("service.engine.work")(name),
    ),
    Arrow(
        "store and tiers know no handlers and no loop",
        ("service/engine/store/*", "service/engine/tiers/*"),
        under("service.engine.handlers", "service.engine.loop"),
    ),
    Arrow(
        "handlers know no loop",
        ("service/engine/handlers/*",),
        under("service.engine.loop"),
    ),
    Arrow(
        "doors never import the engine, the core or kernels",
        ("service/doors/*", "service/gateway/*"),
        under("service.engine", "service.core", "kernels"),
    ),
    Arrow(
        "no door knows another",
        ("service/doors/zmq/*",),
        under("service.doors.http", "fastapi", "starlette", "uvicorn", "httptools"),
    ),
    Arrow(
        "a cluster's router never imports the engine or kernels",
        ("service/cluster/*",),
        under("service.engine", "kernels"),
    ),
    Arrow(
        "the engine knows no door and no web framework",
        ("service/engine/*", "service/core/*", "kernels/*"),
        under("service.doors", "fastapi", "starlette", "uvicorn", "asyncio"),
    ),
    Arrow(
        "the client imports numpy, ml_dtypes and its HTTP parser only",
        ("client/*",),
        beyond("numpy", "httptools", "ml_dtypes", "attnd"),
        but=(*EXTRAS, *ADAPTERS),
    ),
    Arrow(
        "the client does without its extras",
        ("client/*",),
        under(
            *("attnd.torch", "attnd.transformers", "attnd.lmcache", "attnd.vllm", "attnd.sglang")
        ),
        but=(*EXTRAS, *ADAPTERS),
    ),
    Arrow(
        "an adapter imports its engine, numpy and the client's records, and no other adapter",
        ("client/src/attnd/lmcache/*",),
        beyond("numpy", "lmcache", "attnd.engines", "attnd.lmcache"),
    ),
    Arrow(
        "the same for vLLM",
        ("client/src/attnd/vllm/*",),
        beyond("numpy", "vllm", "attnd.engines", "attnd.vllm"),
    ),
    Arrow(
        "the same for SGLang, whose pages are tensors",
        ("client/src/attnd/sglang/*",),
        beyond("numpy", "torch", "sglang", "attnd.engines", "attnd.sglang"),
    ),
    Arrow(
        "the client's steps need torch and nothing else",
        ("client/src/attnd/torch/*",),
        beyond("torch", "attnd"),
        but=("client/src/attnd/torch/embedded.py",),
    ),
    Arrow(
        "attnd.transformers imports torch, transformers and xxhash beside the client",
        ("client/src/attnd/transformers/*",),
        beyond("numpy", "ml_dtypes", "torch", "transformers", "xxhash", "attnd"),
    ),
    *(
        Arrow(f"{names} only in {' '.join(but)}", PRODUCT, under(*names.split()), but)
        for names, but in ONLY.items()
    ),
)


def uses(source: str, file: str, module: str) -> Iterator[Use]:
    """Every import of a module's source, dynamic ones by literal name too, and environment reads.

    `module` is its dotted name, `__init__` included, for relative imports.
    """
    for node in ast.walk(ast.parse(source, file)):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=origin, names=names, level=level):
                parts = module.split(".")[:-level] if level else []
                base = ".".join([*parts, *([origin] if origin else [])])
                found = [f"{base}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id="os"), attr=attr):
                found = [f"os.{attr}"]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found = [name]
            case _:
                continue
        yield from (Use(file, node.lineno, name) for name in found)


def all_uses() -> list[Use]:
    """The uses of every module of the product."""
    found: list[Use] = []
    for tree in TREES:
        top = ROOT / tree if tree == "client/src" else ROOT
        for path in sorted((ROOT / tree).rglob("*.py")):
            module = ".".join(path.relative_to(top).with_suffix("").parts)
            file = path.relative_to(ROOT).as_posix()
            found += uses(path.read_text(encoding="utf-8"), file, module)
    return found


USES: Final = all_uses()


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.rule.replace(" ", "-"))
def test_no_module_imports_against_an_arrow(arrow: Arrow) -> None:
    covered = [use for use in USES if arrow.covers(use.file)]
    assert covered, f"no module matches {arrow.files}"
    broken = [use for use in covered if arrow.breaks(use.name)]
    assert not broken, f"{arrow.rule}, but:\n" + "\n".join(map(str, broken))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch.nn", "torch.nn"),
        ("def f():\n    from torch import nn", "torch.nn"),
        ("from . import other", "service.core.other"),
        ("from ..engine import other", "service.engine.other"),
        ("import importlib\nimportlib.import_module('cupy')", "cupy"),
        ("import os\nos.environ['HOME']", "os.environ"),
        ("from os import getenv", "os.getenv"),
    ],
)
def test_a_use_is_seen_however_it_is_written(source: str, name: str) -> None:
    found = list(uses(source, "service/core/plan.py", "service.core.plan"))
    assert name in [use.name for use in found], f"{source!r} gives {found}"
    assert all(use.line >= 1 for use in found)


def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    found = {}
    for tree in TREES:
        top = ROOT / tree if tree == "client/src" else ROOT
        for path in (ROOT / tree).rglob("*.py"):
            name = ".".join(path.relative_to(top).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(nodes: list[ast.stmt], *, types: bool) -> Iterator[str]:
    """Names that run when a module or its functions run; `types`: those for type checkers, too."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(origin), names=names, level=0):
                yield from (f"{origin}.{alias.name}" for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse) if not types:
                yield from imported(orelse, types=types)
            case _:
                for field in ("body", "orelse", "finalbody"):
                    yield from imported(getattr(node, field, []), types=types)
                for handler in getattr(node, "handlers", []):
                    yield from imported(handler.body, types=types)


def import_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty when there is none."""
    left = dict(imports)
    while True:
        free = [name for name, others in left.items() if not others & left.keys()]
        if not free:
            break
        for name in free:
            del left[name]
    while True:  # modules that are only imported are in no circle either
        used = set().union(*left.values()) if left else set()
        unused = left.keys() - used
        if not unused:
            return sorted(left)
        for name in unused:
            del left[name]


PARENT_AND_CHILD: Final = (
    ("attnd.road.connection", "attnd.road.pending"),
    ("attnd.steps.lane", "attnd.steps.step"),
    ("service.road.engine_end.calls", "service.road.engine_end.session"),
)
"""The only circles, of types alone: the second module of a pair names what its objects belong
to."""


@pytest.mark.parametrize("types", [False, True], ids=["imports that run", "all imports"])
def test_no_modules_import_each_other_in_a_circle(types: bool) -> None:
    paths = modules()
    imports: dict[str, set[str]] = {}
    for name, path in paths.items():
        imports[name] = set()
        for used in imported(ast.parse(path.read_text(encoding="utf-8")).body, types=types):
            while used and used not in paths:
                used = used.rpartition(".")[0]
            if used and used != name:
                imports[name].add(used)
    for first, second in PARENT_AND_CHILD:
        imports[first].discard(second)
        imports[second].discard(first)
    assert import_circle(imports) == []


def test_a_circle_is_found_through_a_third_module() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert import_circle(imports) == ["b", "c"]


def test_no_two_classes_of_the_service_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "service").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}
