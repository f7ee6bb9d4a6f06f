"""``python -m nbspawn._agent HOST PORT NODE [detached]``, with the token on the standard input: serves a kernel.

It ends with its standard input. ``detached``: in a process that is no child of the one that has started this.
"""

import os
import sys

if __name__ == "__main__":
    if sys.argv[4:] and os.fork():
        os._exit(0)
    os.setsid()
    host, port, node = sys.argv[1:4]
    token = bytes.fromhex(sys.stdin.readline().strip())

    from nbspawn._agent.node import serve

    serve((host, int(port)), token, int(node))
