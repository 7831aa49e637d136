"""A Ray of several nodes on this host, for as long as standard input is open: prints its address,
then each line when it is done: `add` a node, or `kill` one.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main() -> None:
    head = NODE | {"resources": {"door": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)  # type: ignore[no-untyped-call]
    others = []
    try:
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "add":
                others.append(cluster.add_node(**NODE))  # type: ignore[no-untyped-call]
            else:
                cluster.remove_node(others.pop(), allow_graceful=False)  # type: ignore[no-untyped-call]
            print(line.strip(), flush=True)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
