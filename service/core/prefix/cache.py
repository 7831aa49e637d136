"""The prefix cache: finds, leases, pins and evicts committed pages by their names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from service.core.errors import InvalidRequest, UnknownLease, UnknownPage
from service.core.keys import Prefix
from service.core.nodes import FOREVER, REFERENCED, Int32, Lease, Node, Retention, Root, named
from service.core.pool.budget import Budget
from service.core.pool.links import Links
from service.core.pool.named_pages import Cleared
from service.core.prefix.commits import keep_path
from service.core.prefix.matching import MOST_MATCHED, Match, named_path, walk
from service.core.timers import Timers

ENDED_AT_ONCE: Final = 256
"""Maximum leases that end in one tick: a millisecond or two. The next tick ends the rest."""


