"""``python -m nbspawn._agent HOST PORT NODE``, with the token on the standard input: serves the kernel there."""

import sys

from nbspawn._agent.node import serve

if __name__ == "__main__":
    token = bytes.fromhex(sys.stdin.readline().strip())
    serve((sys.argv[1], int(sys.argv[2])), token, int(sys.argv[3]))
