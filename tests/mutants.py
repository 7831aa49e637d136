"""Mutation testing: does a test fail when one expression or statement of the code is wrong?

`python -m tests.mutants` takes a random sample of all mutants of the code, and runs for each the
test files nearest to its module by imports, until a test fails that passes without the mutant.
Survivors then meet seeds of the world that their module runs in. Each is printed as a diff.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
COPIED: Final = ("service", "config", "kernels", "client", "tests", "docs", "examples", "deploy")
FOLDERS: Final = ("service", "config", "client/src", "kernels")
WORLDS: Final = {  # the world that modules of a folder run in, and its number of seeds
    "service/cluster": ("cluster", 20),
    "client/src/attnd": ("cluster", 20),
    "service/doors/http": ("cluster", 20),
    "service/tiers": ("disk", 100),
    "service": ("engine", 60),
}
BATCHES: Final = (3, 6, 12, 24)  # test files of a mutant that are run together
PAIRS: Final = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
    (ast.BitAnd, ast.BitOr),
)
SWAPPED: Final = {**dict(PAIRS), **{two: one for one, two in PAIRS}, ast.Mod: ast.FloorDiv}
MUTED: Final = re.compile(r"\b(LOG|log|logger|warnings|metrics?)\b")  # reports: no behaviour
STARTED: Final = re.compile(r"service\.(.*__main__|doors\..*\.server)$")  # by a service
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes `begin` to `end` of a file are replaced."""

    path: str
    begin: int
    end: int
    text: str

    @property
    def source(self) -> bytes:
        return (ROOT / self.path).read_bytes()

    @property
    def mutated(self) -> bytes:
        return self.source[: self.begin] + self.text.encode() + self.source[self.end :]

    @property
    def line(self) -> int:
        return self.source.count(b"\n", 0, self.begin) + 1

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}:{self.begin}"

    @property
    def diff(self) -> str:
        old, new = ast.unparse(ast.parse(self.source)), ast.unparse(ast.parse(self.mutated))
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        shown = [line.strip() for line in list(lines)[3:]]
        return "\n      ".join([self.place, *shown])


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """What a node is replaced by: other nodes, or text."""

    def edited(**fields: Any) -> ast.AST:
        every = {name: getattr(node, name) for name in node._fields}
        return type(node)(**every | fields)

    match node:
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            new = SWAPPED[type(op)]()
            yield edited(ops=[new]) if isinstance(node, ast.Compare) else edited(op=new)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.IfExp():
            yield edited(body=node.orelse, orelse=node.body)
        case ast.If(test=test) if "TYPE_CHECKING" not in ast.unparse(test):
            yield "False"
        case ast.Expr(value=ast.Call()) if not MUTED.search(ast.unparse(node)):
            yield "pass"  # a call is forgotten
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op):
            yield edited(op=SWAPPED[type(op)]())
        case ast.Break():
            yield "continue"
        case ast.Call(args=args, keywords=keywords):
            if len(args) > 1 and not any(isinstance(one, ast.Starred) for one in args[:2]):
                yield edited(args=[args[1], args[0], *args[2:]])
            for at, one in enumerate(keywords):
                if one.arg is not None:
                    yield edited(keywords=keywords[:at] + keywords[at + 1 :])


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of a file; its annotations, defaults of types, and texts stay as they are."""
    source = (ROOT / path).read_bytes()
    begins, found = [0], list[Mutant]()
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def visit(node: ast.AST) -> None:
        target = node.test if isinstance(node, ast.If) else node
        for new in changes(node):
            assert isinstance(target, (ast.expr, ast.stmt))
            begin = begins[target.lineno - 1] + target.col_offset
            end = begins[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
            text = f"({text})" if isinstance(new, ast.expr) and isinstance(node, ast.expr) else text
            found.append(Mutant(path, begin, end, text))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "msg", "exc"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Raise)):
                    visit(child)

    visit(ast.parse(source))
    return found


def files_of(folder: str) -> list[str]:
    paths = (ROOT / folder).rglob("*.py")
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def module_name(path: str) -> str:
    dotted = path.removeprefix("client/src/").removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


@cache
def importers() -> dict[str, set[str]]:
    """Files by the file that they import. A test file imports the conftest.py above it, and what
    starts a service imports all that a service does."""
    folders = ("service", "config", "kernels", "client/src", "tests", "examples")
    every = [path for folder in folders for path in files_of(folder)]
    by_name = {module_name(path): path for path in every}
    found: dict[str, set[str]] = {path: set() for path in every}
    for path in every:
        text = (ROOT / path).read_text(encoding="utf-8")
        names = list[str]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        if '"-m", "service"' in text:
            names += filter(STARTED.match, by_name)
        imported = {by_name[name] for name in names if name in by_name}
        parents = [f"{parent}/conftest.py" for parent in Path(path).parents]
        imported |= {one for one in parents if path.startswith("tests/") and one in found}
        for one in imported - {path}:
            found[one].add(path)
    return found


def nearest_tests(path: str) -> list[str]:
    """Test files that reach a file, the nearest first; of equal ones those of a like name."""
    distances, todo, graph = {path: 0}, [path], importers()
    for one in todo:
        for other in sorted(graph[one] - distances.keys()):
            distances[other] = distances[one] + 1
            todo.append(other)
    words = {*re.split(r"[/_.]", path)}

    def nearness(test: str) -> tuple[int, str]:
        is_slow = test.startswith(("tests/examples", "tests/models", "tests/packaging"))
        same = len(words & {*re.split(r"[/_.]", test)})
        return 2 * distances[test] - same + 20 * is_slow, test

    tests = (one for one in distances if one.startswith("tests/") and "/test_" in one)
    return sorted((one for one in tests if not one.startswith("tests/world/")), key=nearness)


class Copy:
    """A copy of the code that one process changes and tests."""

    def __init__(self, place: str, limit_s: float) -> None:
        self.limit_s = limit_s
        self.folder = Path(tempfile.mkdtemp(dir=place))
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "node_modules")
        for name in COPIED:
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored, symlinks=True)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, self.folder)
        self.env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        paths = (self.folder, self.folder / "client/src", self.folder / "tests")
        self.env["PYTHONPATH"] = os.pathsep.join(
            [*map(str, paths), os.environ.get("PYTHONPATH", "")]
        )
        self.collected = dict[str, bool]()  # by test file
        self.unfit = set[str]()  # tests that fail here without a mutant

    def run(self, *command: str, limit_s: float) -> tuple[int | None, str]:
        """Exit status (None: it took too long) and output."""
        ran = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = ran.communicate(timeout=limit_s)[0]
            return ran.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, 9)
            return None, ran.communicate()[0]

    def write(self, mutant: Mutant, content: bytes) -> None:
        path = self.folder / mutant.path
        path.write_bytes(content)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def is_collected(self, test: str) -> bool:
        """Whether a file can be collected without a mutant."""
        if test not in self.collected:
            self.collected[test] = self.run("pytest", "-q", "--co", test, limit_s=120)[0] in (0, 5)
        return self.collected[test]

    def failing(self, mutant: Mutant, tests: list[str]) -> str:
        """A test that fails with the mutant only."""
        marks = ("-m", "not long and not timing and not gpu", "--timeout", "60")
        while True:
            out = [word for test in sorted(self.unfit) for word in ("--deselect", test)]
            self.write(mutant, mutant.mutated)
            status, output = self.run(
                *("pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb", "no"),
                *(*marks, *out, *tests),
                limit_s=self.limit_s,
            )
            self.write(mutant, mutant.source)
            names = FAILED.findall(output)
            if status in (0, 5) or (status is None and not names):
                return ""
            if not names:  # what cannot be collected here, a package is missing for
                missing = {one for one in tests if not self.is_collected(one)}
                if not missing:
                    return f"pytest ends with {status}"
                tests = [one for one in tests if one not in missing]
                if not tests:
                    return ""
                continue
            alone = ("pytest", "-q", "-n", "0", *(() if "::" in names[0] else ("--co",)), names[0])
            if self.run(*alone, limit_s=self.limit_s)[0] == 0:
                return str(names[0])
            self.unfit.add(names[0])

    def fate(self, mutant: Mutant, has_world: bool) -> str:
        """What notices a mutant: a test, a world, or "" for nothing."""
        began, tests = time.monotonic(), nearest_tests(mutant.path)
        for size in BATCHES:
            batch, tests = tests[:size], tests[size:]
            if batch and (name := self.failing(mutant, batch)):
                return name
            if time.monotonic() - began > self.limit_s or not tests:
                break
        folder = next((one for one in WORLDS if mutant.path.startswith(one + "/")), None)
        if folder is None or not has_world:
            return ""
        world, seeds = WORLDS[folder]
        seeds_of = ("--world", world, "--seeds", str(seeds), "--no-shrink")
        self.write(mutant, mutant.mutated)
        status, _ = self.run("tests.world", *seeds_of, "--budget-s", "60", limit_s=300)
        self.write(mutant, mutant.source)
        return "" if status == 0 else f"world {world}"


COPIES: Final[list[Copy]] = []  # of this process


def judge(given: tuple[Mutant, argparse.Namespace]) -> tuple[Mutant, str, float]:
    mutant, options = given
    if not COPIES:
        COPIES.append(Copy(options.place, options.limit_s))
    began = time.monotonic()
    return mutant, COPIES[0].fate(mutant, options.worlds), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="of the code (default: all)")
    parser.add_argument("--sample", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit-s", type=float, default=90.0, help="time for a mutant's tests")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="time for all")
    parser.add_argument("--worlds", action="store_true", help="survivors meet seeds of a world")
    parser.add_argument("--only", nargs="+", help="mutants to run again, as PATH:LINE:BYTE")
    parser.add_argument("--out", type=Path, help="file for one line of JSON a mutant")
    options = parser.parse_args()
    files = [path for folder in options.folders for path in files_of(folder)]
    every = [one for path in files for one in mutants_of(path)]
    chosen = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    if options.only:
        chosen = [one for one in every if one.place in options.only]
    began, fates = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory(prefix="attnd-mutants-") as place, Pool(options.jobs) as pool:
        options.place = place
        for mutant, fate, spent_s in pool.imap_unordered(judge, [(one, options) for one in chosen]):
            fates.append(fate)
            print(f"{spent_s:5.0f} s  {fate or 'SURVIVED'}\n    {mutant.diff}", flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps(asdict(mutant) | {"fate": fate, "diff": mutant.diff}) + "\n"
                    )
            if time.monotonic() - began > options.budget_s:
                break
    killed = sum(map(bool, fates))
    print(f"{killed} of {len(fates)} killed ({killed / max(1, len(fates)):.1%}), of {len(every)}")


if __name__ == "__main__":
    main()
