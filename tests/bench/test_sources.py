"""What of a source counts: its tokens, its directives and the headers it leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sources import source_digest, tokens
from kernels.compile import Spec, spec


@pytest.mark.parametrize(
    "other",
    [
        "#define TWICE(x) ((x) * 2)\nint a = TWICE(3);",
        "#define  TWICE(x)  ((x) * 2)  // doubles\n\nint a /* of */ =\n  TWICE( 3 ) ;\n",
        "  #define TWICE(x) \\\n ((x) * 2)\nint a=TWICE(3); /* the end,\n of it */",
    ],
    ids=["same", "spaced", "continued"],
)
def test_comments_and_white_space_are_no_tokens(other: str) -> None:
    assert tokens(other) == "#define TWICE(x) ((x) * 2)\nint a = TWICE ( 3 ) ;"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a + +b;", "a ++b;"),
        ("x = 1;", "x = 2;"),
        ('asm("a b");', 'asm("a  b");'),
        ('s = "// no comment";', 's = "// none";'),
        ("c = '\"'; // x", "c = '\\''; // x"),
        ("1.5e-3f", "1.5e -3f"),
    ],
)
def test_what_a_compiler_tells_apart_are_other_tokens(one: str, other: str) -> None:
    assert tokens(one) != tokens(other)


def test_a_comment_sign_in_a_string_begins_no_comment() -> None:
    assert tokens('s = "/*"; int a; t = "*/"; // end') == 's = "/*" ; int a ; t = "*/" ;'


def test_headers_of_headers_count_and_files_beside_them_do_not(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text('#include "near.cuh"\nint a;')
    (tmp_path / "near.cuh").write_text('#pragma once\n#include "far.cuh"\n')
    (tmp_path / "far.cuh").write_text("#pragma once\nint far = 1;")
    (tmp_path / "apart.cuh").write_text("int apart = 1;")
    before = source_digest(Spec("one", ()), "sm_90a", tmp_path)
    (tmp_path / "apart.cuh").write_text("int apart = 2;")
    assert source_digest(Spec("one", ()), "sm_90a", tmp_path) == before
    (tmp_path / "far.cuh").write_text("#pragma once\nint far = 2;")
    assert source_digest(Spec("one", ()), "sm_90a", tmp_path) != before


def test_definitions_and_architecture_count_and_the_order_of_definitions_does_not() -> None:
    kernel = spec("rows/rows", HEAD_DIM=64, TENSOR=0, STORE=0)
    same = spec("rows/rows", STORE=0, HEAD_DIM=64, TENSOR=0)
    assert source_digest(kernel, "sm_90a") == source_digest(same, "sm_90a")
    others = [
        source_digest(spec("rows/rows", HEAD_DIM=128, TENSOR=0, STORE=0), "sm_90a"),
        source_digest(kernel, "sm_80"),
    ]
    assert source_digest(kernel, "sm_90a") not in others
