"""Runs a notebook on two hosts, with a user who answers its prompts (answered.py), and saves what came out in it.

``python tests/support/on_hosts.py notebooks/many_hosts.ipynb``, as root
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import answered
from cluster import Cluster

if __name__ == "__main__":
    path = Path(sys.argv[1])
    with Cluster(2) as hosts:
        os.environ["RAY_ADDRESS"] = hosts.address
        answered.save(path, answered.run(path))
