"""The live page as a browser shows it: Chromium without a window, over real sockets."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from http_messages import PAGE_SIZE, PAGES, append, create, fill, rows
from http_secrets import keys_file
from http_service import Service, serving
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from tests.browser import browser, check_quiet, network, prefers
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

HUNDRED_THOUSAND: Final = (
    *("--pool.num-pages", "100000"),
    *("--pool.num-layers", "1"),
    *("--pool.num-kv-heads", "1"),
    *("--pool.head-dim", "8"),
)
MOST_FRAME_MS: Final = 100.0
"""A hundred thousand pages take some 3; only what grows out of all bounds is an error here."""
PIXELS: Final = """
const {side, columns} = attnd.map.grid, map = document.getElementById("map");
const copy = new OffscreenCanvas(map.width, map.height);
const context = copy.getContext("2d", {willReadFrequently: true});
context.drawImage(map, 0, 0);
const at = (place) => Math.round(place * side + side / 2);
return Array.from({length: attnd.map.states.length}, (_, page) => {
  const [x, y] = [58 + at(page % columns), at(Math.floor(page / columns))];
  return [...context.getImageData(x, y, 1, 1).data].slice(0, 3);
});
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chrome]:
    with browser() as driver:
        yield driver


@pytest.fixture
def driver(chromium: Chrome) -> Iterator[Chrome]:
    """The browser as new: no key, no theme, nothing that the user prefers."""
    prefers(chromium)
    chromium.get_log("browser")
    list(network(chromium))
    yield chromium
    chromium.execute_script("sessionStorage.clear()")
    chromium.get("about:blank")


def text(driver: Chrome, name: str) -> str:
    found: str = driver.find_element(By.ID, name).text
    return found


def style(driver: Chrome, selector: str, name: str) -> str:
    found: str = driver.find_element(By.CSS_SELECTOR, selector).value_of_css_property(name)
    return found


def open_live(driver: Chrome, service: Service) -> None:
    driver.get(f"{service.url}/live")
    wait_for(lambda: text(driver, "state") == "live", "the first snapshot")


def pool_shown(driver: Chrome) -> dict[str, Any]:
    reply = driver.execute_script("return document.body.dataset.pool")
    return dict(json.loads(reply)) if reply else {}


def fill_pages(client: httpx.Client, name: str, pages: int) -> None:
    fill(client, np.random.default_rng(0), name, pages * PAGE_SIZE)


def colours(driver: Chrome) -> dict[str, list[int]]:
    """Of the states, as the legend shows them."""
    found = {}
    for state in ("free", "referenced", "cached"):
        reply = style(driver, f".split .{state}", "background-color")
        found[state] = [int(part) for part in re.findall(r"\d+", reply)[:3]]
    return found


def press(driver: Chrome, *keys: str) -> None:
    ActionChains(driver).send_keys(*keys).perform()


def focus(driver: Chrome, name: str) -> None:
    """As the Tab key does."""
    for _ in range(20):
        press(driver, Keys.TAB)
        if driver.switch_to.active_element.get_attribute("id") == name:
            return
    raise AssertionError(f"Tab does not lead to {name}")


def test_the_page_shows_the_services_own_numbers(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    fill_pages(client, "a", 5)
    client.post("/v1/sequences", json={"sequences": [{"id": "b", "parent": "a"}]})
    open_live(driver, service)
    wait_for(lambda: pool_shown(driver).get("sequences") == 2, "both sequences")
    reply, shown = client.get("/v1/pool").json(), pool_shown(driver)
    for name in ("free", "referenced", "cached", "pinned", "total", "sequences", "leases", "nodes"):
        assert shown[name] == reply[name], name
    assert text(driver, "used-of") == f"5 of {PAGES} pages referenced, 0 cached"
    assert text(driver, "sequences") == "2"
    shown_as = "import('/live/format.js').then(m => arguments[1](m.duration(arguments[0])))"
    durations = {ms: driver.execute_async_script(shown_as, ms) for ms in (0.9994, 0.9996, 999.6)}
    assert [one.split("\u202f") for one in durations.values()] == [
        *(["999", "µs"], ["1", "ms"], ["1", "s"]),
    ]
    assert "2 layers" in text(driver, "service")
    metrics = client.get("/metrics").text
    ratio = float(re.findall(r"^attnd_kv_cache_usage_ratio (\S+)$", metrics, re.MULTILINE)[0])
    assert float(text(driver, "used").rstrip("%")) == pytest.approx(100 * ratio, abs=0.05)
    columns = {"tokens_appended_total": "tokens", "kv_bytes_saved_total": "saved"}
    counted = {
        column: float(re.findall(rf"^attnd_{name} (\S+)$", metrics, re.MULTILINE)[0])
        for name, column in columns.items()
    }

    def totals() -> dict[str, float]:
        return dict(json.loads(driver.execute_script("return document.body.dataset.totals")))

    wait_for(lambda: totals().items() >= counted.items(), "the next second's totals")
    check_quiet(driver, service.url)


def test_the_map_and_the_tree_change_as_sequences_come_and_go(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    prefers(driver, prefers_reduced_motion="reduce")
    open_live(driver, service)
    of = colours(driver)
    assert len({tuple(one) for one in of.values()}) == 3
    assert driver.execute_script(PIXELS) == PAGES * [of["free"]]

    def shown(*states: str) -> bool:
        """Whether the first pages are drawn so, and all others as free ones."""
        found = driver.execute_script(PIXELS)
        return bool(found == [of[one] for one in states] + (PAGES - len(states)) * [of["free"]])

    fill_pages(client, "a", 7)
    wait_for(lambda: shown(*7 * ["referenced"]), "its pages")
    ids = list(range(4 * PAGE_SIZE))
    assert client.post("/v1/sequences/a/commit", json={"token_ids": ids}).is_success
    client.delete("/v1/sequences/a")
    wait_for(lambda: shown(*4 * ["cached"]), "the remaining pages")
    client.post("/v1/prefix/clear", json={})
    wait_for(shown, "the end")
    check_quiet(driver, service.url)


def test_the_keyboard_reaches_all_of_it(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    fill_pages(client, "a", 3)
    open_live(driver, service)
    wait_for(lambda: pool_shown(driver).get("referenced") == 3, "the pages")
    focus(driver, "map")
    press(driver, Keys.HOME, Keys.ARROW_RIGHT)
    assert text(driver, "map-read") == "page 1: referenced"
    press(driver, Keys.END)
    assert text(driver, "map-read") == f"page {PAGES - 1}: free"
    press(driver, Keys.TAB, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert text(driver, "tree-read").startswith("one sequence: 3 pages, shared by 1 sequence")
    focus(driver, "throughput")
    wait_for(lambda: driver.execute_script("return attnd.rows.rows.length") > 2, "some seconds")
    press(driver, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert text(driver, "throughput-read").startswith("1 s ago: ")
    press(driver, "p")
    assert text(driver, "state") == "paused"
    press(driver, "p", "?")
    assert driver.find_element(By.ID, "keys").is_displayed()
    press(driver, "t", "t")
    assert text(driver, "theme") == "Theme: dark"
    wait_for(lambda: text(driver, "state") == "live", "going on")


def test_it_is_dark_where_the_user_prefers_dark(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    def brightness() -> int:
        return sum(map(int, re.findall(r"\d+", style(driver, "body", "background-color"))[:3]))

    open_live(driver, service)
    bright, of = brightness(), colours(driver)
    prefers(driver, prefers_color_scheme="dark")
    wait_for(lambda: brightness() < 100 < bright, "the dark")
    wait_for(lambda: driver.execute_script(PIXELS)[0] == colours(driver)["free"], "a dark map")
    assert colours(driver) != of


@pytest.mark.parametrize("width", [1920, 1440, 820, 390, 320])
def test_the_page_fits_every_width_and_no_panel_moves_under_load(
    driver: Chrome, service: Service, client: httpx.Client, width: int
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    tops = """return [...document.querySelectorAll("main > *, .tile, canvas, table")]
      .map((one) => one.getBoundingClientRect())
      .map(({x, y, width, height}) => [x, y, width, height])"""
    try:
        open_live(driver, service)
        wait_for(lambda: pool_shown(driver).get("total") == PAGES, "the pool")
        wait_for(lambda: "squares a row" in text(driver, "map-read"), "the map")
        before = driver.execute_script(tops)
        fill_pages(client, "a", 5)
        for depth in range(9):
            parent = {"id": f"f{depth}", "parent": f"f{depth - 1}" if depth else "a"}
            assert client.post("/v1/sequences", json={"sequences": [parent]}).is_success
            fill_rows = rows(np.random.default_rng(depth), PAGE_SIZE)
            for layer in range(2):
                append(client, layer, f"f{depth}", fill_rows, fill_rows)
        wait_for(lambda: pool_shown(driver).get("sequences") == 10, "a deep tree")
        driver.execute_script("return new Promise(requestAnimationFrame)")
        assert driver.execute_script(tops) == before
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_pointer_has_its_readout_beside_it(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    fill_pages(client, "a", 3)
    open_live(driver, service)
    wait_for(lambda: pool_shown(driver).get("referenced") == 3, "the pages")
    wait_for(lambda: "squares a row" in text(driver, "map-read"), "the map")
    place = driver.execute_script(
        "const box = document.getElementById('map').getBoundingClientRect();"
        "return [box.x + 58 + attnd.map.grid.side / 2, box.y + attnd.map.grid.side / 2]"
    )
    x, y = (round(at) for at in place)
    chain = ActionChains(driver)
    chain.w3c_actions.pointer_action.move_to_location(x, y)
    chain.perform()
    assert text(driver, "tooltip") == text(driver, "map-read") == "page 0: referenced"
    box = driver.find_element(By.ID, "tooltip").rect
    assert 0 < box["x"] - x < 40 and 0 < box["y"] - y < 40
    chain = ActionChains(driver)
    chain.w3c_actions.pointer_action.move_to_location(2, 2)
    chain.perform()
    assert not driver.find_element(By.ID, "tooltip").is_displayed()


def test_a_page_that_changes_gets_a_ring_and_keeps_its_colour(
    driver: Chrome, service: Service, client: httpx.Client
) -> None:
    open_live(driver, service)
    of = colours(driver)
    fill_pages(client, "a", 7)
    wait_for(lambda: pool_shown(driver).get("referenced") == 7, "its pages")
    shown = {tuple(one) for one in driver.execute_script(PIXELS)}
    assert shown <= {tuple(of["referenced"]), tuple(of["free"])}


@pytest.mark.timing
def test_a_hundred_thousand_pages_are_drawn_without_a_stutter(driver: Chrome) -> None:
    with serving(*HUNDRED_THOUSAND) as running, running.client() as client:
        driver.get(f"{running.url}/live")
        wait_for(lambda: pool_shown(driver).get("total") == 100_000, "the pool")
        driver.execute_script("attnd.frames.length = 0")
        rng = np.random.default_rng(0)
        for number in range(3):
            create(client, f"s{number}")
            k = rng.standard_normal((20_000 * PAGE_SIZE, 1, 8)).astype(np.float32)
            append(client, 0, f"s{number}", k, k)
            held = 20_000 * (number + 1)
            wait_for(lambda held=held: pool_shown(driver).get("referenced") == held, "more pages")
        client.delete("/v1/sequences/s1")
        wait_for(lambda: pool_shown(driver).get("referenced") == 40_000, "fewer pages")
        states = driver.execute_script(
            "return [...attnd.map.states].reduce((sum, state) => sum + (state === 1), 0)"
        )
        assert states == 40_000
        frames = driver.execute_script("return attnd.frames")
        assert statistics.median(frames) < MOST_FRAME_MS, sorted(frames)
        check_quiet(driver, running.url)


def test_a_lost_connection_is_reported_and_made_again(driver: Chrome, service: Service) -> None:
    open_live(driver, service)
    driver.execute_script("""
        attnd.message = [];
        const keep = () => attnd.message.push(document.getElementById("state").textContent);
        new MutationObserver(keep).observe(document.getElementById("state"), {childList: true});
    """)
    server = service.doors[0][0]
    assert server.loop is not None

    def cut() -> None:
        for connection in list(service.door.connections):
            connection.transport.abort()

    server.loop.call_soon_threadsafe(cut)
    reply: list[str] = []

    def is_back() -> bool:
        reply[:] = driver.execute_script("return attnd.message")
        return reply[-1:] == ["live"]

    wait_for(is_back, "the second connection")
    assert reply == ["connection lost", "live"]
    assert not driver.find_element(By.ID, "trouble").is_displayed()


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(driver: Chrome, tmp_path: Path) -> None:
    held = {"user": ("red", ["read"]), "operator": ("ops", ["admin"])}
    with serving(*keys_file(tmp_path, held)) as running:
        driver.get(f"{running.url}/live")
        for key, why in (("", "requires a key"), ("unknown", "revoked"), ("user", "scope admin")):
            if key:
                press(driver, key, Keys.ENTER)
            wait_for(lambda why=why: why in text(driver, "key-why"), f"a refusal with {why}")
            assert text(driver, "state") == "needs a key" and not pool_shown(driver)
        press(driver, "operator", Keys.ENTER)
        wait_for(lambda: pool_shown(driver).get("total") == PAGES, "the pool")
        assert not driver.find_element(By.ID, "key-form").is_displayed()
        open_live(driver, running)
        press(driver, "k")
        driver.find_element(By.ID, "key-forget").click()
        wait_for(lambda: text(driver, "state") == "needs a key", "the key to be revoked")
