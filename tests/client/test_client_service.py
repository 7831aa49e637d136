"""Both clients against running services: every route, real errors, split KV."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnd
import ml_dtypes
import numpy as np
import oracle
import pytest
from attnd import (
    AsyncClient,
    AttentionState,
    CascadeLevel,
    Client,
    NewSequence,
    Session,
    merge_states,
)
from numpy.typing import NDArray

from tests.client.client_stub import Awaited
from tests.client.conftest import Served
from tests.harness.processes import run

Array = NDArray[Any]
LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 2, 8, 64
BOUNDS: dict[Any, float] = {np.float32: 1e-5, np.float16: 1e-3, ml_dtypes.bfloat16: 1e-2}


def rows(seed: int, count: int, heads: int, dtype: Any = np.float32) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, heads, HEAD_DIM)).astype(dtype)


def dense(q: Array, k: Array, v: Array, seen: Array | None = None) -> tuple[Array, Array]:
    """o and natural lse in float64; seen [queries, keys]."""
    seen = np.ones((len(q), len(k)), bool) if seen is None else seen
    return oracle.attend(q, k, v, seen, sm_scale=HEAD_DIM**-0.5)


def hold(client: Client, name: str, k: Array, v: Array) -> str:
    """Store k and v as a sequence's layer 0."""
    client.create_sequence(name)
    client.append(0, [name], k, v, append_indptr=[0, len(k)], offsets=[0])
    return name


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("cuts", [(0, 700), (1, 700), (350, 351), (699, 700), (17, 500)])
def test_one_sequence_split_over_two_services_equals_one_holding_it_all(
    client: Client, other: Client, dtype: Any, cuts: tuple[int, int]
) -> None:
    k, v = rows(1, 700, KV_HEADS, dtype), rows(2, 700, KV_HEADS, dtype)
    q = rows(3, 1, QUERY_HEADS, dtype)
    first, second = cuts
    # Three runs on two services: beginning and end on one, the middle on the other.
    results = [
        client.decode(0, [hold(client, "begin", k[:first], v[:first])], q),
        other.decode(0, [hold(other, "mid", k[first:second], v[first:second])], q, lse_base="2"),
        client.decode(0, [hold(client, "end", k[second:], v[second:])], q),
    ]
    merged = merge_states([result.state for result in results])
    whole = client.decode(0, [hold(client, "whole", k, v)], q)
    o, lse = dense(q, k, v)
    case = f"{np.dtype(dtype)} cut at {cuts}"
    bound = BOUNDS[dtype]
    np.testing.assert_allclose(merged.o.astype(float), o, rtol=0, atol=bound, err_msg=case)
    np.testing.assert_allclose(merged.lse, lse, rtol=0, atol=1e-3, err_msg=case)
    np.testing.assert_allclose(
        merged.o.astype(float), whole.o.astype(float), rtol=0, atol=bound, err_msg=case
    )
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=0, atol=1e-5, err_msg=case)


def test_merging_here_and_on_the_service_agree(client: Client) -> None:
    o = np.stack([rows(i, 5, QUERY_HEADS) for i in range(3)], axis=1)
    lse = np.random.default_rng(4).standard_normal((5, 3, QUERY_HEADS)).astype(np.float32) * 3
    lse[0, 1], lse[1] = -np.inf, -np.inf
    for base in ("e", "2"):
        theirs = client.merge(o, lse, lse_base=base).state
        ours = merge_states([AttentionState(o[:, i], lse[:, i], base) for i in range(3)])
        np.testing.assert_allclose(ours.lse, theirs.lse, atol=1e-6, err_msg=base)
        np.testing.assert_allclose(ours.o, theirs.o, atol=1e-6, err_msg=base)
        assert (theirs.o[1] == 0).all()
    ragged = client.merge(
        o.reshape(15, QUERY_HEADS, HEAD_DIM), lse.reshape(15, -1), indptr=[0, 3, 15]
    )
    assert ragged.o.shape == (2, QUERY_HEADS, HEAD_DIM)


def tour(ask: Callable[..., Any]) -> dict[str, Any]:
    """Every route once; what came back, for comparing."""
    k, v, q = rows(1, 40, KV_HEADS), rows(2, 40, KV_HEADS), rows(3, 2, QUERY_HEADS)
    seen: dict[str, Any] = {"info": ask("info").num_layers, "live": ask("live").ok}
    seen["created"] = ask("create_sequences", [NewSequence("p")])
    for layer in range(LAYERS):
        seen[f"append {layer}"] = ask(
            "append", layer, ["p"], k, v, append_indptr=[0, 40], offsets=[0]
        )
    seen["forked"] = ask("create_sequences", [NewSequence("a", "p"), NewSequence("b", "p", 35)])
    state = ask("decode", 0, ["a", "b"], q, cascade="always")
    seen["decode"] = (state.o.tolist(), state.lse.tolist(), state.levels, state.cascade)
    sinks = np.arange(8, dtype=np.float32) / 4
    state = ask("decode", 0, ["a", "b"], q, sinks=sinks)
    seen["sinks"] = (state.o.tolist(), state.lse.tolist())
    merged = ask("merge", state.o[:, None], state.lse[:, None], sinks=sinks)
    seen["merged with sinks"] = (merged.o.tolist(), merged.lse.tolist())
    prefill = ask("prefill", 1, ["a", "b"], rows(4, 5, 8), [0, 2, 5], causal=True, window_left=9)
    seen["prefill"] = prefill.o.tolist()
    mask = np.random.default_rng(0).random(2 * 40) < 0.5
    masked = ask("prefill", 0, ["p"], q, [0, 2], mask=mask)
    packed = ask("prefill", 0, ["p"], q, [0, 2], mask=np.packbits(mask, bitorder="little"))
    np.testing.assert_allclose(masked.o, dense(q, k, v, mask.reshape(2, 40))[0], atol=1e-5)
    np.testing.assert_array_equal(masked.o, packed.o)
    ragged = ask("ragged_prefill", q, k, v, [0, 1, 2], [0, 10, 40], sm_scale=HEAD_DIM**-0.5)
    np.testing.assert_allclose(ragged.o[1:], dense(q[1:], k[10:], v[10:])[0], atol=1e-5)
    levels = [CascadeLevel(["p"], [0, 2]), CascadeLevel(["x", "y"], [0, 1, 2])]
    ask("create_sequences", [NewSequence("x"), NewSequence("y")])
    ask("append", 0, ["x", "y"], k[:2], v[:2])
    cascade = ask("cascade", 0, levels, q, return_levels=True)
    np.testing.assert_allclose(merge_states(cascade.level_states).o, cascade.o, atol=1e-6)
    gathered = ask("gather", 0, ["p", "y"])
    np.testing.assert_array_equal(gathered.k[:40], k)
    seen["gather"] = gathered.kv_indptr.tolist()
    table = ask("page_table", ["a", "b"])
    seen["table"] = (table.kv_indptr.tolist(), table.kv_last_page_len.tolist(), len(table.levels))
    seen["truncate"] = ask("truncate", "a", 7)
    seen["get"] = ask("get_sequence", "a")
    seen["page"] = ask("sequence_page", limit=2)
    seen["pool"] = ask("pool")
    for name in "pabxy":
        ask("delete_sequence", name)
    seen["ready"] = ask("ready").ok
    return seen


def test_every_route_gives_the_same_to_all_clients_over_tcp_unix_socket_and_road(
    client: Client, there: str, here: Served
) -> None:
    def method(of: Any) -> Callable[..., Any]:
        return lambda name, *args, **kwargs: getattr(of, name)(*args, **kwargs)

    with Awaited(AsyncClient(there)) as other:
        first, second = tour(method(client)), tour(method(other))
    with Session(here.road) as session:
        third = tour(method(session))
    assert first == second == third
    assert first["forked"][1].length == 35
    assert first["page"].next == "b"
    assert first["pool"].sharing_ratio > 1
    assert first["decode"][2:] == (2, True)
    assert "attnd_tokens_appended_total" in client.metrics()


def test_arrays_made_in_the_arena_append_and_decode_as_any_others(
    client: Client, here: Served
) -> None:
    k, v, q = rows(1, 1, KV_HEADS), rows(2, 1, KV_HEADS), rows(3, 1, QUERY_HEADS)
    client.create_sequence("a")
    with Session(here.road, arena_bytes=2**20) as session:
        inputs = {
            name: session.empty(name, array.shape, array.dtype)
            for name, array in (("q", q), ("k", k), ("v", v))
        }
        for name, array in (("q", q), ("k", k), ("v", v)):
            inputs[name][...] = array
        for step in range(20):
            result = session.decode(
                0, ["a"], inputs["q"], k=inputs["k"], v=inputs["v"], offsets=[step]
            )
    np.testing.assert_allclose(
        result.o, dense(q, np.repeat(k, 20, 0), np.repeat(v, 20, 0))[0], atol=1e-5
    )
    assert client.get_sequence("a").lengths == (20, 0)


def test_a_session_grows_its_arena_and_gathers_more_than_it_thought(
    client: Client, here: Served
) -> None:
    k, v = rows(1, 1500, KV_HEADS), rows(2, 1500, KV_HEADS)
    with Session(here.road, arena_bytes=2**20) as session:
        session.create_sequence("a")
        session.append(0, ["a"], k, v, append_indptr=[0, 1500], offsets=[0])
        gathered = session.gather(0, ["a"])
        some = session.gather(0, ["a"], start=3, stop=10)
    np.testing.assert_array_equal(gathered.k, k)
    np.testing.assert_array_equal(gathered.v, v)
    np.testing.assert_array_equal(some.v, v[3:10])
    assert some.kv_indptr.tolist() == [0, 7]


def test_the_async_list_and_many_decodes_at_once_are_right(client: Client, here: Served) -> None:
    k, v = rows(1, 50, KV_HEADS), rows(2, 50, KV_HEADS)
    names = [hold(client, f"s{i:02}", k[: i + 1], v[: i + 1]) for i in range(50)]
    q = rows(3, 1, QUERY_HEADS)

    async def run() -> tuple[list[str], list[attnd.AttentionResult]]:
        async with AsyncClient(uds=here.uds) as many:
            listed = [sequence.id async for sequence in many.list_sequences(page_size=7)]
            return listed, await asyncio.gather(*(many.decode(0, [name], q) for name in names))

    listed, results = asyncio.run(run())
    assert listed == names
    for i, result in enumerate(results):
        np.testing.assert_allclose(
            result.o, dense(q, k[: i + 1], v[: i + 1])[0], atol=1e-5, err_msg=f"{i + 1} keys"
        )


def test_refusals_of_a_running_service_carry_their_numbers(client: Client, other: Client) -> None:
    one = rows(1, 1, KV_HEADS)
    with pytest.raises(attnd.UnknownSequence) as unknown:
        client.decode(0, ["no", "body"], rows(1, 2, QUERY_HEADS))
    assert unknown.value.sequences == ("no", "body")
    client.create_sequence("a")
    with pytest.raises(attnd.SequenceExists) as exists:
        client.create_sequence("a")
    assert exists.value.sequences == ("a",)
    client.append(0, ["a"], one, one)
    with pytest.raises(attnd.LengthMismatch) as mismatch:
        client.append(0, ["a"], one, one, offsets=[5])
    assert mismatch.value.lengths == {"a": 1}
    many = np.zeros((129 * 16, KV_HEADS, HEAD_DIM), np.float32)
    with pytest.raises(attnd.OutOfPages) as pages:
        client.append(0, ["a"], many, many, append_indptr=[0, len(many)])
    assert (pages.value.needed, pages.value.free, pages.value.total) == (129, 127, 128)
    with pytest.raises(attnd.InvalidRequest) as invalid:
        client.decode(0, ["a"], rows(1, 1, 3))
    assert invalid.value.field.startswith("q")
    with pytest.raises(attnd.InvalidRequest, match="F64"):
        client.decode(0, ["a"], rows(1, 1, QUERY_HEADS, np.float64))
    with pytest.raises(attnd.BodyTooLarge) as large:
        other.append(0, ["a"], many, many, append_indptr=[0, len(many)])
    assert large.value.limit == 2**20
    assert large.value.size > 2**20
    assert client.get_sequence("a").lengths == (1, 0)


def test_the_readme_program_runs(
    other: Client, there: str, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = Path(__file__).resolve().parents[2] / "client" / "README.md"
    program = readme.read_text().split("```python\n")[1].partition("```")[0]
    exec(program.replace("http://127.0.0.1:8080", there), {})
    assert capsys.readouterr().out.startswith("(2, 8, 64) (2, 8) 2 ")


def test_the_client_needs_nothing_that_a_service_is_made_of() -> None:
    heavy = ["torch", "cupy", "fastapi", "pydantic", "service", "kernels", "config", "httpx"]
    program = (
        f"import attnd, sys; attnd.Client; print([name for name in {heavy} if name in sys.modules])"
    )
    client = Path(attnd.__file__).parents[1]
    reply = run(sys.executable, "-W", "error", "-c", program, check=True, cwd=client)
    assert reply.stdout == "[]\n"


def test_the_names_of_the_client_are_listed_before_the_first_use_of_one() -> None:
    program = "import attnd; print({'Client', 'OutOfPages', 'Info'} <= set(dir(attnd)))"
    reply = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert reply.stdout == "True\n", reply.stderr


def test_a_session_finds_its_engine_by_the_url_of_the_service(there: str) -> None:
    with Client(there) as client, Session(there) as session:
        assert session.info().instance_id == client.info().instance_id
    with Session(there.replace("127.0.0.1", "localhost")) as session:
        assert session.info().instance_id


@pytest.mark.parametrize("url", ["http://attnd.example:8080", "https://10.0.0.1"])
def test_a_session_with_another_host_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match=r"is another host.*use attnd\.Client"):
        Session(url)
