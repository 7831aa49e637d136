"""The live page: what it costs, and its picture.

`python -m bench.live` prints what a snapshot costs the engine, what a viewer is sent, how long a
frame takes to draw, and what small decodes wait with and without viewers, in a pool of a hundred
thousand pages. `python -m bench.live --picture docs/live.png` lets chats run for five minutes and
draws the page as it is then; `--seconds` makes them fewer.
"""

from __future__ import annotations

import argparse
import base64
import io
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from attnd import Client
from PIL import Image
from selenium.webdriver import Chrome

from bench.browser import browser, prefers
from bench.chats import DIM, HEADS, LAYERS, POOL, QO_HEADS, chat
from bench.machine import command, machine
from bench.servers import Server, attnd
from service.core.outline import outline, page_states
from service.core.tree import PrefixTree
from service.core.values import NewSpec

PAGES: Final = 100_000
SEQUENCES: Final = 2_000
PICTURE: Final = ("--pool.num-pages", "900")
FULL_S: Final = 305.0
WIDTH: Final = 1440
LOOK_S: Final = 8.0
DECODES: Final = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seconds", type=float, default=FULL_S)
    chosen = parser.parse_args()
    if chosen.picture is not None:
        draw(chosen.picture, chosen.seconds)
        return
    print(f"{machine()}; {command()}; {PAGES:,} pages, {SEQUENCES:,} sequences\n")
    for name, value in {**engine_figures(), **service_figures()}.items():
        print(f"{name:<48} {value}")


# The picture.


@contextmanager
def chatting(server: Server) -> Iterator[str]:
    """A service with chats; its address."""
    url, ends = f"http://127.0.0.1:{server.port}", threading.Event()
    thread = threading.Thread(target=chat, args=(url, ends))
    thread.start()
    try:
        yield url
    finally:
        ends.set()
        thread.join()


def draw(path: Path, seconds: float) -> None:
    with attnd(*POOL, *PICTURE) as server, chatting(server) as url, browser() as driver:
        time.sleep(seconds)
        prefers(driver, prefers_reduced_motion="reduce")
        driver.get(f"{url}/live")
        time.sleep(2.0)
        shoot(driver, path)


def shoot(driver: Chrome, path: Path) -> None:
    """The whole page as a small PNG: it has few colours."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1.0)
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    few = image.quantize(256, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {image.width} x {image.height}, {path.stat().st_size // 1024} KiB")


# What it costs.


def engine_figures() -> dict[str, str]:
    """Of a full pool: what the engine does for one snapshot."""
    tree = PrefixTree(PAGES, 16, 1)
    rng = np.random.default_rng(0)
    for number in range(SEQUENCES):
        parent = f"s{number // 8}" if number % 3 else None
        tree.create([NewSpec(f"s{number}", parent=parent)])
        tree.extend(0, [f"s{number}"], np.array([rng.integers(16, 800)], np.int32))
    return {
        "engine: states of all pages, ms": f"{timed(lambda: page_states(tree)):.2f}",
        "engine: the tree's largest parts, ms": f"{timed(lambda: outline(tree)):.2f}",
    }


def timed(work: Any, repeats: int = 15) -> float:
    """The median, in milliseconds."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return median(found)


def service_figures() -> dict[str, str]:
    """Of a service with a browser before it, or none."""
    with attnd(*POOL, "--pool.num-pages", str(PAGES)) as server:
        url = f"http://127.0.0.1:{server.port}"
        alone = decode_times(url)
        with chatting(server), browser() as driver:
            driver.get(f"{url}/live")
            time.sleep(LOOK_S)
            frames: list[float] = driver.execute_script("return attnd.frames")
        watched, sent = watched_decodes(url, 1)
        crowd, _ = watched_decodes(url, 20)
    return {
        "page: a frame, median and longest, ms": f"{median(frames):.1f}, {max(frames):.1f}",
        "door: to one viewer, KiB/s": f"{sent / 1024:.0f}",
        "decode, nobody looks: p50, p99, ms": quantiles(alone),
        "decode, one looks: p50, p99, ms": quantiles(watched),
        "decode, twenty look: p50, p99, ms": quantiles(crowd),
    }


def decode_times(url: str) -> list[float]:
    """Seconds of small decodes, one after another."""
    with Client(url) as client:
        name = client.create_sequence().id
        k = np.ones((64, HEADS, DIM), np.float16)
        for layer in range(LAYERS):
            client.append(layer, [name], k, k, append_indptr=[0, 64])
        q, found = np.ones((1, QO_HEADS, DIM), np.float16), []
        for _ in range(DECODES):
            started = time.perf_counter()
            client.decode(0, [name], q)
            found.append(time.perf_counter() - started)
            time.sleep(0.01)
        client.delete_sequence(name)
    return found


def watched_decodes(url: str, viewers: int) -> tuple[list[float], float]:
    """The same while so many look; and the bytes a second that one of them is sent."""
    ends, counts = threading.Event(), [0] * viewers

    def look(number: int) -> None:
        with urllib.request.urlopen(f"{url}/live/stream") as stream:
            while not ends.is_set():
                counts[number] += len(stream.read1(2**16))

    threads = [threading.Thread(target=look, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    started = time.perf_counter()
    found = decode_times(url)
    took = time.perf_counter() - started
    ends.set()
    for thread in threads:
        thread.join()
    return found, counts[0] / took


def quantiles(seconds: list[float]) -> str:
    p50, p99 = (1e3 * float(np.quantile(seconds, at)) for at in (0.5, 0.99))
    return f"{p50:.2f}, {p99:.2f}"


if __name__ == "__main__":
    main()
