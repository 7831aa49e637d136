"""/docs in Chromium: its examples, pressed one after another, and its colours."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from http_service import Service
from selenium.webdriver import Chrome
from test_http_examples import WITHOUT

from service.operations.table import OPERATIONS
from tests.browser import browser, check_quiet, network, prefers
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

OPEN = """
const block = document.getElementById(arguments[0]);
block.scrollIntoView();
if (!block.classList.contains("is-open")) block.querySelector(".opblock-summary-control").click();
"""
CLOSE = """
document.getElementById(arguments[0]).querySelector(".opblock-summary-control").click();
"""
STATUS = """
const found = document.getElementById(arguments[0]).querySelector(
  ".live-responses-table .response .response-col_status");
return found ? found.textContent : "";
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser() as driver:
        driver.set_script_timeout(120)
        yield driver


def blocks(driver: Chrome) -> dict[str, str]:
    """The ids of the operations on the page, from its top, by operation id."""
    ids = "return [...document.querySelectorAll('.opblock')].map((one) => one.id)"
    return {re.sub("^operations-[^-]*-", "", one): one for one in driver.execute_script(ids)}


@pytest.mark.slow
def test_every_example_succeeds_when_they_are_pressed_one_after_another(
    driver: Chrome, service: Service
) -> None:
    driver.get_log("browser")
    list(network(driver))
    driver.get(f"{service.url}/docs")
    wait_for(lambda: len(blocks(driver)) > len(OPERATIONS), "the operations")
    found = blocks(driver)
    assert {one.name for one in OPERATIONS} <= found.keys()
    for name, block in found.items():
        if name in WITHOUT:
            continue
        driver.execute_script(OPEN, block)
        execute = f"return document.getElementById('{block}').querySelector('.execute')"
        wait_for(lambda program=execute: driver.execute_script(program), f"the form of {name}")
        driver.execute_script(f"{execute.removeprefix('return ')}.click()")
        wait_for(lambda block=block: driver.execute_script(STATUS, block), f"the reply of {name}")
        assert re.match("2..", driver.execute_script(STATUS, block)), name
        driver.execute_script(CLOSE, block)
    check_quiet(driver, service.url)


def test_a_tensor_of_an_example_is_one_line(driver: Chrome, service: Service) -> None:
    driver.get(f"{service.url}/docs")
    wait_for(lambda: "append" in blocks(driver), "the operations")
    block = blocks(driver)["append"]
    driver.execute_script(OPEN, block)
    program = f"return document.getElementById('{block}').querySelector('textarea')?.value ?? ''"
    wait_for(lambda: driver.execute_script(program), "the form")
    text = driver.execute_script(program)
    assert re.search(r'"data": \[1,0,[0-9,]*\]\n', text) and text.count("\n") < 40


def test_it_is_dark_where_the_user_prefers_dark(driver: Chrome, service: Service) -> None:
    def brightness(selector: str, name: str) -> int:
        program = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        found: str = driver.execute_script(program, selector, name)
        return sum(map(int, re.findall(r"\d+", found)[:3]))

    driver.get(f"{service.url}/docs")
    wait_for(lambda: blocks(driver), "the operations")
    assert brightness("body", "backgroundColor") > 700 > 300 > brightness(".title", "color")
    prefers(driver, prefers_color_scheme="dark")
    wait_for(lambda: brightness("body", "backgroundColor") < 150, "the dark")
    assert brightness(".title", "color") > 500
    prefers(driver)
