"""`make_backend`, and the properties that a backend reports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from pooled import Pooled, int32, normal

from kernels import cuda_devices, driver_problem, make_backend
from kernels.backend import (
    NUMPY_DTYPES,
    Attend,
    Backend,
    DeviceLost,
    Level,
    Plan,
    PoolGeometry,
    RaggedAttend,
    Scoring,
    Unsupported,
)
from tests.harness.processes import run

GEOMETRY = PoolGeometry(2, 4, 4, 2, 64, "NHD", "fp16")


def attend_ragged_fp8(made: Backend) -> None:
    q, ends = np.ones((1, 2, 64), np.float16), int32([0, 1])
    kv = np.ones((1, 2, 64), NUMPY_DTYPES["fp8_e4m3"])
    made.attend_ragged(RaggedAttend(q, kv, kv, ends, ends, True, Scoring(1.0))).result()


ATTEMPTS = {
    "pools of fp32": lambda make: make(PoolGeometry(1, 2, 4, 2, 64, "NHD", "fp32")),
    "head_dim other than": lambda make: make(PoolGeometry(1, 2, 4, 2, 72, "NHD", "fp16")),
    "engine.numerics: invariant": lambda make: make(GEOMETRY, numerics="invariant"),
    "ragged keys of fp8": lambda make: attend_ragged_fp8(make(GEOMETRY)),
    "gather into fp8": lambda make: make(GEOMETRY).gather(0, int32([0]), "fp8_e5m2").result(),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_backend_rejects_exactly_its_unsupported_list(backend, attempt) -> None:
    listed = any(line.startswith(attempt) for line in backend(GEOMETRY).unsupported)
    with pytest.raises(Unsupported) if listed else nullcontext():
        ATTEMPTS[attempt](backend)


def test_every_refusal_a_backend_lists_is_tried_here(backend) -> None:
    untried = [
        line for line in backend(GEOMETRY).unsupported if not line.startswith(tuple(ATTEMPTS))
    ]
    assert untried == []


def test_auto_is_cuda_where_a_device_answers() -> None:
    made = make_backend("auto", GEOMETRY)
    assert made.name == ("cuda" if cuda_devices() else "cpu")
    made.close()


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tpu"):
        make_backend("tpu", GEOMETRY)


def test_the_cpu_backend_is_made_without_importing_cupy() -> None:
    script = (
        "import sys; from kernels import make_backend; from kernels.backend import PoolGeometry\n"
        "make_backend('cpu', PoolGeometry(1, 1, 1, 1, 8))\n"
        "assert 'cupy' not in sys.modules and 'service' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


def test_planning_imports_at_the_start_what_numpy_imports_at_the_first_call() -> None:
    script = (
        "import sys, numpy; import kernels.cuda.plan.planner; known = set(sys.modules)\n"
        "numpy.unique(numpy.array([2, 1, 2])); assert set(sys.modules) == known"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_outside_the_pool_is_refused(backend, rng, page) -> None:
    pooled = Pooled(backend(GEOMETRY), rng, "fp16")
    level = Level(int32([0, 1]), int32([0, 1]), int32([page]), int32([2]), int32([0]), causal=False)
    q = normal(rng, (1, 4, 64), "fp16")
    with pytest.raises(ValueError, match="kv_indices"):
        pooled.backend.attend([Attend(0, q, Plan((level,), int32([1])), Scoring(1.0))])


def test_results_belong_to_the_caller(backend, rng) -> None:
    pooled = Pooled(backend(GEOMETRY), rng, "fp16")
    plan = pooled.flat([pooled.add(7)], [1], True)
    q = normal(rng, (1, 4, 64), "fp16")
    first = pooled.backend.attend([Attend(0, q, plan, Scoring(1.0))]).result()[0]
    kept = first.o.copy()
    pooled.backend.attend([Attend(0, normal(rng, (1, 4, 64), "fp16"), plan, Scoring(1.0))]).result()
    assert np.array_equal(first.o, kept)
    first.o[...] = 0
    first.lse[...] = 0


@pytest.mark.parametrize(
    ("installed", "remedy"),
    [(False, "pip install 'cupy-cuda13x"), (True, "nvidia-smi")],
)
def test_cuda_without_a_device_reports_the_reason_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, installed: bool, remedy: str
) -> None:
    monkeypatch.setattr("kernels.cuda_devices", lambda: 0)
    monkeypatch.setattr("kernels.driver_problem", lambda: "")
    monkeypatch.setattr("kernels.find_spec", lambda name: object() if installed else None)
    with pytest.raises(DeviceLost, match=r"^backend.kind = cuda: .*or set backend.kind: cpu") as no:
        make_backend("cuda", GEOMETRY)
    assert remedy in str(no.value)


DRIVER = """
int cuInit(unsigned flags) { return CODE; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "its own reason"; return 0; }
"""


@pytest.mark.parametrize(
    ("code", "version", "reported"),
    [
        (0, 11080, "the NVIDIA driver supports CUDA 11.8, and CuPy needs CUDA 1"),
        (803, 99000, "the NVIDIA driver reports error 803, its own reason: "),
        (100, 99000, "no CUDA device responds on this machine"),
    ],
)
def test_an_unusable_driver_is_reported_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, version: int, reported: str
) -> None:
    pytest.importorskip("cupy")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "cuda.c").write_text(DRIVER)
    library = tmp_path / f"libcuda-{code}-{version}.so"
    made = [f"-DCODE={code}", f"-DVERSION={version}", "-o", library]
    subprocess.run([compiler, "-shared", "-fPIC", *made, tmp_path / "cuda.c"], check=True)
    monkeypatch.setattr("kernels.cuda.device.devices.DRIVER", str(library))
    monkeypatch.setattr("kernels.cuda_devices", lambda: 0)
    with pytest.raises(DeviceLost, match=f"^backend.kind = cuda: {reported}"):
        make_backend("cuda", GEOMETRY)
    assert bool(driver_problem()) == (code != 100)


def test_compile_without_cupy_is_one_line_with_the_remedy() -> None:
    hidden = "import importlib.util as u, sys; u.find_spec = lambda name: None; "
    program = hidden + "from kernels.__main__ import main; sys.exit(main(['compile']))"
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("attnd compile: needs CuPy") and done.stderr.count("\n") == 1
