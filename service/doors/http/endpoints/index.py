"""The page at `/`, for browsers."""

from __future__ import annotations

from html import escape
from typing import Final

LINKS: Final = (
    ("live", "Shows the pool, the prefix tree and the load as they are now."),
    ("docs", "Lists every route with its fields, tensors and errors."),
    ("openapi.json", "Is the same list as an OpenAPI document."),
    ("v1/info", "Gives the pool's shape, the backend and the limits."),
    ("v1/pool", "Counts the pages by state."),
    ("metrics", "Has the counters and gauges of all processes for Prometheus."),
    ("health/ready", "Answers 200 when requests will be answered, else 503 with the reason."),
    ("health/live", "Answers 200 while this door serves HTTP."),
)
"""Paths relative to the page, so that it works behind a proxy's prefix."""

PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>attnd</title>
</head>
<body>
<h1>attnd</h1>
<p>Attention and KV cache as a service.</p>
<dl>
{links}
</dl>
{keys}
</body>
</html>
"""
KEYS: Final = """\
<p>This service has keys. A route that needs one answers 401 without it: send the key in the
header <code>Authorization: Bearer KEY</code>.</p>"""


def index_page(has_live: bool, has_keys: bool) -> str:
    """The page of a service with these settings."""
    links = (
        f'<dt><a href="{path}">/{escape(path)}</a></dt><dd>{escape(text)}</dd>'
        for path, text in LINKS
        if has_live or path != "live"
    )
    return PAGE.format(links="\n".join(links), keys=KEYS if has_keys else "")
