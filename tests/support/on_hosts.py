"""Runs a notebook that needs hosts, with a user who answers its prompts (answered.py), and saves what came out in it.

``python tests/support/on_hosts.py notebooks/many_hosts.ipynb`` or ``notebooks/over_ssh.ipynb``, as root
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import answered
from cluster import Cluster
from kernels import Reply
from sshd import Servers


def over_ssh(path: Path, hosts: Servers) -> list[Reply]:
    """What the notebook's cells leave behind on these hosts, which do not have the directory that it runs in."""
    path_of_programs = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as directory:
        for host in (1, 2):
            # torch looks addresses up as those of IPv6, and prints a warning for each that has no name.
            hosts.put(
                host, "/etc/hosts", "".join(f"::ffff:{hosts.address_of(other)} host{other}\n" for other in (1, 2))
            )
            hosts.run([*hosts.inside(host), "mount", "-t", "tmpfs", "none", directory])
        return answered.run(path, directory, NBSPAWN_SSH=hosts.client, PATH=path_of_programs)


if __name__ == "__main__":
    notebook = Path(sys.argv[1])
    if notebook.stem == "over_ssh":
        with Servers(2) as servers:
            answered.save(notebook, over_ssh(notebook, servers))
    else:
        with Cluster(2) as nodes:
            os.environ["RAY_ADDRESS"] = nodes.address
            answered.save(notebook, answered.run(notebook))
