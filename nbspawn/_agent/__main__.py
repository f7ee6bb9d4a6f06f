"""Serves a kernel: ``python -m nbspawn._agent HOST PORT NODE [detached]`` one that listens there, with the token on the
standard input; NODE is ``slurm`` for the number of Slurm's task. ``python -m nbspawn._agent connected FD,FD,FD NODE``
serves the one to which these sockets lead.

It ends with its standard input. ``detached``: in a process that is no child of the one that has started this.
"""

import os
import socket
import sys
from contextlib import suppress

if __name__ == "__main__":
    if sys.argv[4:] and os.fork():
        os._exit(0)
    with suppress(PermissionError):  # it leads a process group already: of a step of Slurm's
        os.setsid()
    host, port, node = sys.argv[1:4]
    if node == "slurm":
        node = os.environ["SLURM_PROCID"]
        if not os.path.isdir(os.environ["PWD"]):  # Slurm has taken /tmp
            sys.exit(f"there is no {os.environ['PWD']}, the notebook's directory: %cd to one that all nodes have")

    from nbspawn._agent.node import serve
    from nbspawn._protocol import connection

    if host == "connected":
        ends = [socket.socket(fileno=int(fd)) for fd in port.split(",")]
        address = os.environ.pop("NBSPAWN_NODE_ADDRESS", "127.0.0.1")
    else:
        token = bytes.fromhex(sys.stdin.readline().strip())
        ends = [connection.connect((host, int(port)), token, purpose, int(node)) for purpose in connection.PURPOSES]
        address = ends[0].getsockname()[0]
    control, bulk, life = ends
    serve(control, bulk, life, address)
