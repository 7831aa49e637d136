"""The chat page of examples/serve in Chromium: over scripted answers, and over model and attnd."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from attnd import AttndError
from attnd.wire.answers import Snapshot
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from examples.serve import checks
from examples.serve.admission import Admission
from examples.serve.answers import Delta, Sampling
from examples.serve.api import Model, create_app
from examples.serve.page import Page
from tests.browser import browser, prefers
from tests.examples.served import Server, running, save_tiny
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

HOSTILE = """\
<script>hacked = 1</script> <img src=x onerror="hacked = 1"> &lt;b&gt;
[a](javascript:hacked=1) [b](data:text/html,x) ![c](http://example.com/i.png) [d](https://example.com)

| <svg onload=hacked=1> | `<i>` |
|---|---|
| **<u>** | [x](java
script:1) |

```html"><script>
</code></pre><script>hacked = 1</script>
```
"""
MARKDOWN = {
    "*a* **b `c`** ~~d~~": "<p><em>a</em> <strong>b <code>c</code></strong> <del>d</del></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\*": "<p>snake_case_name 2 * 3 * 4 *x*</p>",
    "## A\ntext": "<h4>A</h4><p>text</p>",
    "- a\n- b\n  1. c\n\n3) d": "<ul><li>a</li><li>b<ol><li>c</li></ol></li><li>d</li></ul>",
    "2. a\n   more\n3. b": '<ol start="2"><li>a\nmore</li><li>b</li></ol>',
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "```py\na < b\n\n c": '<figure><figcaption>py</figcaption><pre tabindex="0">'
    "<code>a &lt; b\n\n c</code></pre></figure>",
    "a|b\n-|-\n1|2": '<div class="wide"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>'
    "<tr><td>1</td><td>2</td></tr></tbody></table></div>",
    "---": "<hr>",
    "**open `and": "<p>**open `and</p>",
}
CONTRAST = """
const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const rgba = (text) => {
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data];
};
const light = ([r, g, b]) => [r, g, b]
  .map((one) => one / 255)
  .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
  .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const found = rgba(getComputedStyle(one).backgroundColor);
    if (found[3] === 255) return found;
  }
};
const poor = [];
for (const element of document.querySelectorAll("body *")) {
  const hasText = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  if (!hasText || !element.checkVisibility() || element.closest(".unseen, noscript")) continue;
  const style = getComputedStyle(element);
  const [a, b] = [light(rgba(style.color)), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push([element.textContent.trim().slice(0, 30), ratio]);
}
return poor;
"""


class Script:
    """A scheduler whose answers a test writes."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.emits: list[Callable[[Delta], None]] = []
        self.cancelled = 0
        self.preemptions = 0

    def submit(
        self, prompt: list[int], sampling: Sampling, count: int, emit: Callable[[Delta], None]
    ) -> Any:
        self.emits.append(emit)
        return SimpleNamespace(prompt=prompt, cached_tokens=30)

    def cancel(self, request: Any) -> None:
        self.cancelled += 1

    def say(self, text: str, finish: Any = None, number: int = -1) -> None:
        self.emits[number](Delta(0, text, 1, finish=finish))

    def read(self, messages: list[dict[str, str]]) -> list[int]:
        self.prompts.append(messages)
        return [1] * 40


@dataclass
class Scripted:
    """A server of the page with a script in the place of model and scheduler."""

    script: Script = field(default_factory=Script)
    port: int = 0
    server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listening = checks.bind("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        own = Sampling(512, temperature=0.2, top_p=0.9)
        prompts: Any = SimpleNamespace(chat=self.script.read)
        model = Model("tiny", range(9), prompts, 4096, own)
        page = Page("tiny", "http://127.0.0.1:1/live", own, no_attnd)
        admission = Admission("127.0.0.1", [], 3)
        app = create_app(self.script, model, page, admission)  # type: ignore[arg-type]
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        wait_for(lambda: self.server and self.server.started, "the server")

    def stop(self) -> None:
        assert self.server is not None
        self.server.should_exit = True
        self.thread.join(30)


def no_attnd() -> Snapshot:
    raise AttndError("no engine at /socket")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chrome]:
    with browser() as driver:
        yield driver


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def driver(chromium: Chrome, scripted: Scripted) -> Chrome:
    """The page as new."""
    prefers(chromium)
    chromium.get(scripted.url)
    wait_for(lambda: value(chromium, "system"), "the page")
    return chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tiny(tmp_path_factory.mktemp("model") / "tiny")
    with running(folder, "--pool-tokens", "8192", "--answer-tokens", "3000") as server:
        yield server


def ask(driver: Chrome, text: str) -> None:
    driver.find_element(By.ID, "text").send_keys(text, Keys.ENTER)


def text(driver: Chrome, selector: str) -> str:
    """Of the last such element that is shown; empty without one."""
    program = """
      const all = [...document.querySelectorAll(arguments[0])];
      return all.findLast((one) => one.checkVisibility())?.innerText ?? "";
    """
    found: str = driver.execute_script(program, selector)
    return found


def value(driver: Chrome, name: str) -> str:
    found: str = driver.execute_script(f"return document.getElementById('{name}').value")
    return found


def press(driver: Chrome, *keys: str) -> None:
    ActionChains(driver).send_keys(*keys).perform()


def click(driver: Chrome, selector: str) -> None:
    driver.find_elements(By.CSS_SELECTOR, selector)[-1].click()


def is_idle(driver: Chrome) -> bool:
    return text(driver, "#send") == "Send"


def test_an_answer_streams_with_its_numbers_and_is_announced(
    driver: Chrome, scripted: Scripted
) -> None:
    script = scripted.script
    ask(driver, "<b>is this shown as it is?</b>")
    wait_for(lambda: text(driver, "#announce") == "Waiting for the answer", "the waiting")
    wait_for(lambda: "Waiting for the model, 1 s" in text(driver, ".wait"), "a second")
    assert text(driver, ".user p") == "<b>is this shown as it is?</b>"
    wait_for(lambda: script.emits, "the request")
    assert script.prompts[0][0] == {"role": "system", "content": value(driver, "system").strip()}
    script.say("One **two")
    wait_for(lambda: text(driver, ".text") == "One **two", "the first piece")
    assert not text(driver, ".wait") and text(driver, "#send") == "Stop"
    script.say("** three.", "length")
    wait_for(lambda: is_idle(driver), "the end")
    assert text(driver, ".text strong") == "two"
    assert text(driver, ".note") == "Cut off after 2 tokens, the most of one answer."
    assert "30 of 40 prompt tokens cached" in text(driver, ".numbers")
    assert "tokens/s" in text(driver, ".numbers")
    assert text(driver, "#cached-tokens") == "30 · 75%"
    assert text(driver, "#announce") == "Answer: One **two** three."
    ask(driver, "more?")
    wait_for(lambda: len(script.prompts) == 2, "the second request")
    roles = [(one["role"], one["content"][:5]) for one in script.prompts[1][1:]]
    assert roles == [("user", "<b>is"), ("assistant", "One *"), ("user", "more?")]


def test_stop_and_retry_by_keyboard(driver: Chrome, scripted: Scripted) -> None:
    script = scripted.script
    message = ("first", Keys.SHIFT, Keys.ENTER, Keys.NULL, "line", Keys.ENTER)
    driver.find_element(By.ID, "text").send_keys(*message)
    wait_for(lambda: script.emits, "the request")
    assert script.prompts[0][-1]["content"] == "first\nline"
    script.say("Half")
    wait_for(lambda: text(driver, ".text") == "Half", "the first piece")
    press(driver, Keys.ESCAPE)
    wait_for(lambda: is_idle(driver) and script.cancelled == 1, "the end")
    assert text(driver, ".note") == text(driver, "#announce") == "Stopped."
    driver.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)
    assert driver.switch_to.active_element.text == "Retry"
    press(driver, Keys.ENTER)
    wait_for(lambda: len(script.emits) == 2, "the second attempt")
    assert script.prompts[1] == script.prompts[0]
    assert driver.switch_to.active_element.get_attribute("id") == "text"
    script.say("Whole.", "stop")
    wait_for(lambda: is_idle(driver), "its end")
    assert text(driver, ".answer .text") == "Whole."
    assert len(driver.find_elements(By.CSS_SELECTOR, ".answer")) == 1


def test_errors_are_sentences_and_can_be_tried_again(driver: Chrome, scripted: Scripted) -> None:
    script = scripted.script
    ask(driver, "one?")
    wait_for(lambda: script.emits, "the request")
    script.emits[-1](Delta(0, error="attnd does not answer: no engine"))
    wait_for(lambda: text(driver, ".error"), "the error")
    assert text(driver, ".error") == "The answer failed: attnd does not answer: no engine."
    scripted.stop()
    click(driver, ".retry")
    wait_for(lambda: "The server does not answer" in text(driver, ".error"), "another error")
    scripted.start()
    ask(driver, "two?")  # in the place of a question that has no answer
    wait_for(lambda: len(script.emits) == 2, "the next request")
    assert [one["content"] for one in script.prompts[-1][1:]] == ["two?"]
    script.say("Begun")
    wait_for(lambda: text(driver, ".text") == "Begun", "the answer to begin")
    scripted.stop()
    wait_for(lambda: "ended before the answer did" in text(driver, ".error"), "a lost connection")
    scripted.start()
    for _ in range(3):
        click(driver, "#new")
        ask(driver, "many?")
    wait_for(lambda: len(script.emits) == 5, "as many as there may be")
    click(driver, "#new")
    ask(driver, "one more?")
    wait_for(lambda: "as many requests as it takes" in text(driver, ".error"), "a 429")
    assert "no engine at /socket" in text(driver, "#trouble")


def test_chats_run_side_by_side_and_end_when_they_are_closed(
    driver: Chrome, scripted: Scripted
) -> None:
    script = scripted.script
    click(driver, "#all")
    wait_for(lambda: len(script.emits) == 3, "three requests")
    assert len({messages[0]["content"] for messages in script.prompts}) == 1
    assert len(driver.find_elements(By.CSS_SELECTOR, ".tab.busy")) == 3
    for number in range(3):
        script.say(f"Answer {number}.", "stop", number)
    wait_for(lambda: not driver.find_elements(By.CSS_SELECTOR, ".tab.busy"), "their ends")
    tabs = driver.find_elements(By.CSS_SELECTOR, ".tab")
    shown = []
    for tab in tabs:
        tab.click()
        shown.append(text(driver, ".text"))
        assert tab.get_attribute("aria-current") == "true"
    assert sorted(shown) == ["Answer 0.", "Answer 1.", "Answer 2."]
    ask(driver, "another?")
    wait_for(lambda: len(script.emits) == 4, "the fourth request")
    cancelled = script.cancelled
    click(driver, ".close")
    wait_for(lambda: script.cancelled == cancelled + 1, "the answer to be cancelled")
    assert len(driver.find_elements(By.CSS_SELECTOR, ".tab")) == 2


def test_hostile_text_stays_text(driver: Chrome, scripted: Scripted) -> None:
    ask(driver, "hostile?")
    wait_for(lambda: scripted.script.emits, "the request")
    for piece in HOSTILE.splitlines(keepends=True):
        scripted.script.say(piece)
    scripted.script.say("", "stop")
    wait_for(lambda: is_idle(driver), "the end")
    shown = text(driver, ".text")
    for part in ("<script>hacked = 1</script>", "<img src=x onerror", "&lt;b&gt;", "javascript:"):
        assert part in shown
    names, links, hacked = driver.execute_script(
        "const all = [...document.querySelectorAll('.text *')];"
        "return [all.map((one) => one.localName), all.flatMap((one) => one.href ?? []),"
        " typeof hacked]"
    )
    assert not set(names) & {"script", "img", "svg", "i", "u", "iframe"}
    assert links == ["http://example.com/i.png", "https://example.com/"]
    assert hacked == "undefined"


def test_markdown_becomes_elements(driver: Chrome) -> None:
    program = """
      const [sources, done] = arguments, root = document.createElement("div");
      import("/page/markdown.js").then(({show}) => done(sources.map((source) => {
        root.replaceChildren();
        for (let end = 1; end < 99; end++) show(root, source.slice(0, end)); // as it grows
        show(root, source);
        return root.innerHTML;
      })));
    """
    found = driver.execute_async_script(program, list(MARKDOWN))
    assert dict(zip(MARKDOWN, found, strict=True)) == MARKDOWN
    deep = ["> " * 500 + "x", "- " * 500 + "x", "*_" * 3000, "`" * 5000, "[" * 5000, "**a" * 2000]
    begun = time.monotonic()
    assert all(driver.execute_async_script(program, [one[:40] + one for one in deep]))
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_width_and_can_be_read(
    driver: Chrome, scripted: Scripted, scheme: str
) -> None:
    prefers(driver, prefers_color_scheme=scheme)

    def check() -> None:
        assert driver.execute_script(CONTRAST) == []
        for width in (320, 390, 768, 1280, 1920):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            overflow = "return document.documentElement.scrollWidth - innerWidth"
            assert driver.execute_script(overflow) <= 0, width
            for name in ("text", "send", "new", "theme"):
                box = driver.find_element(By.ID, name).rect
                assert 0 <= box["x"] <= box["x"] + box["width"] <= width, (width, name)
                assert box["y"] + box["height"] <= 800 and box["height"] >= 24, (width, name)

    try:
        check()
        ask(driver, "What is " + "a_very_long_word_" * 20 + "?")
        wait_for(lambda: scripted.script.emits, "the request")
        scripted.script.say(
            "word" * 200 + "\n\n```\n" + "code " * 100 + "\n```\n\n> `x`\n\n|a|\n|-|\n|b|"
        )
        scripted.script.emits[-1](Delta(0, error="a problem"))
        wait_for(lambda: is_idle(driver), "the end")
        check()
        for _ in range(12):
            click(driver, "#new")
            ask(driver, "Another?")
            wait_for(lambda: not text(driver, "#welcome"), "the chat")
        check()
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_two_tabs_that_begin_alike_share_pages(server: Server, chromium: Chrome) -> None:
    """The second tab finds the first one's system prompt, and both draw one box for it."""
    chromium.get(server.url)
    tabs = [chromium.current_window_handle]
    chromium.switch_to.new_window("tab")
    tabs.append(chromium.current_window_handle)
    chromium.get(server.url)

    parents = "return Math.max(0, ...tree.parts.slice(1).map((one) => one.children.length))"
    try:
        for number, tab in enumerate(tabs):
            chromium.switch_to.window(tab)
            ask(chromium, f"{number} and others?")
            wait_for(lambda: len(text(chromium, ".text")) > 20, "the answer to begin")
        for tab in tabs:
            chromium.switch_to.window(tab)
            wait_for(lambda: chromium.execute_script(parents) >= 2, "a box with two below")
            press(chromium, Keys.ESCAPE)
            wait_for(lambda: is_idle(chromium), "the end")
        assert text(chromium, "#pages").endswith("of 512")
        live = chromium.find_element(By.ID, "live")
        assert live.get_attribute("href") == f"{server.attnd}/live"
    finally:
        chromium.close()
        chromium.switch_to.window(tabs[0])
