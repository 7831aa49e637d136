"""Every example as its reader runs it: a process of its own, no network, exit status 0."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import processes

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str, **environment: str) -> str:
    """The output of a command; fails with the output unless its status is 0."""
    offline = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = processes.run(*command, env=offline, timeout=280)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(example: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / example), *arguments)


def test_the_readme_lists_every_example() -> None:
    output = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix in (".py", ".sh"):
            assert path.name in output, f"{path.name} is not in examples/README.md"


def test_every_example_explains_itself() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        if "if __name__" in path.read_text():
            done = processes.run(sys.executable, str(path), "--help", timeout=60)
            assert done.returncode == 0 and done.stdout.startswith("usage:"), path.name


def test_quickstart_shows_levels_and_bytes_saved() -> None:
    output = python("quickstart.py")
    assert "4 forks: 67 pages in use" in output, output
    assert "2 cascade levels" in output, output
    # 62 shared pages of 16 tokens, read once and not four times, in two layers of 512 bytes
    assert f"saved reading: {3 * 62 * 16 * 512 * 2}" in output, output
    assert "409 length_mismatch: true length 1000" in output, output
    assert "deleted: 0 pages in use" in output, output


def test_a_growing_chat_finds_its_history_in_the_prefix_cache() -> None:
    output = python("prefix_cache.py")
    assert "first chat, turn 1: 0 of 230 tokens cached" in output, output
    assert "first chat, turn 4: 368 of 440 tokens cached" in output, output
    assert "second chat, turn 1: 160 of 230 tokens cached" in output, output
    assert "409 key_mismatch: page 0 has a name already" in output, output
    assert "evicted in the end: 10 pages, 128 free" in output, output
    assert "red chat, turn 3: to service 0, 128 of 210 tokens cached" in output, output
    assert "blue chat, turn 3: to service 1, 128 of 210 tokens cached" in output, output
    assert "service 0 was cleared: the router knows [0, 13] pages" in output, output


def test_cascade_shows_three_levels_that_merge_into_the_answer() -> None:
    output = python("cascade.py")
    assert "level 2: qo_indptr [0, 1, 2, 3, 4, 5, 6, 7, 8]" in output, output
    assert "keys read: 1209, where flat decoding reads 5786" in output, output


def test_kv_at_two_engines_gives_the_numbers_of_float64() -> None:
    output = python("split_kv.py", "--tokens", "1500", "--chunk", "256")
    for way in ("HTTP", "steps"):
        assert f"{way}: 768 + 736 tokens, 10 calls in" in output, output


def test_a_sequence_moves_through_a_file_and_to_a_service_that_has_most_of_it() -> None:
    output = python("moving.py")
    assert "half a file: receiving" in output, output
    assert "1000 tokens" in output, output
    assert "both services decode the same, to the bit" in output, output
    assert "copied: 992 tokens were cached there, 1 page new" in output, output


@pytest.mark.parametrize("protocol", ["grpc"])
def test_tritons_own_client_decodes_forks(protocol: str) -> None:
    output = python("triton_client.py", "--protocol", protocol)
    assert "decode of 4 forks: o (4, 8, 64) float16" in output, output
    assert "every lse has grown: True" in output, output
    assert "length_mismatch: offsets differ from the stored lengths: prompt has 1000" in output, (
        output
    )


def test_a_transformers_model_served_generates_what_its_own_attention_does() -> None:
    output = python("transformers_generate.py", "--rounds", "1")
    assert "256 of 256 tokens equal to eager attention" in output, output
    assert "\ntoken for token equal\n" in output, output
    # 12 shared pages of 16 tokens, read once and not eight times, in 4 layers and 32 steps
    saved = 7 * 12 * 16 * (2 * 2 * 64 * 4) * 4 * 32
    assert f"saved by sharing: {saved} " in output, output
    speed = r"first tokens after [\d.]+ s, then [\d.]+ tokens/s; [\d.]+ tokens/s with the prefill"
    for way in ("attnd, prefix shared", "attnd", "eager", "sdpa", "sdpa, static cache"):
        assert re.search(rf"^{way} *: {speed}$", output, re.MULTILINE), output
    for rate in ("prefill excluded", "prefill included"):
        verdict = rf"^{rate}, attnd has [\d.]+ x the tokens/s of .* attnd is (faster|slower) than"
        assert re.search(verdict, output, re.MULTILINE), output


def test_logits_too_far_apart_end_with_a_failure_and_near_ties_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("transformers_generate")
    logits = torch.eye(32) * torch.linspace(0.9, 1.0, 32)
    reference = example.Generation([list(range(32))], [logits])
    flipped = [*range(9), 3, *range(10, 32)]
    example.compare(example.Generation([flipped], [logits - 0.04]), reference, "fp16")
    with pytest.raises(SystemExit, match=r"FAILED: logits may differ by 0\.05 at fp16"):
        example.compare(example.Generation([range(32)], [logits + 0.06]), reference, "fp16")
    with pytest.raises(SystemExit, match=r"FAILED: logits may differ by 0\.05 at fp16"):
        example.compare(example.Generation([range(32)], [logits + torch.nan]), reference, "fp16")
    with pytest.raises(SystemExit, match=r"FAILED: logits may differ by 0\.001 at fp32"):
        example.compare(example.Generation([flipped], [logits]), reference, "fp32")
    output = capsys.readouterr().out
    assert "continuation 0 diverges at token 9: 3 for 9, whose logits are 9.3e-01 apart" in output
    assert "equal but for near-ties\n" in output, output


def test_every_step_of_curl_gets_its_answer() -> None:
    program = (
        "from local_service import serve; import os, subprocess, sys\n"
        "settings = {'pool.num-layers': 1, 'pool.num-kv-heads': 1, 'pool.head-dim': 2}\n"
        "with serve({**settings, 'pool.dtype': 'fp32'}) as uds:\n"
        "    os.environ['ATTND_SOCKET'] = uds\n"
        "    sys.exit(subprocess.run(['examples/curl.sh', 'http://attnd']).returncode)\n"
    )
    output = run(sys.executable, "-c", program, PYTHONPATH=str(EXAMPLES))
    assert '{"status":"ready"}' in output, output
    assert '"data":[2.0,3.0]' in output, output
    assert '"lengths":{"prompt":3}' in output, output
    assert output.rstrip().endswith('"integrity":"ok"}'), output
