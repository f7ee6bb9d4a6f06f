"""This node's network: the interface with its address, and whether its DNS answers."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import sys

_SIOCGIFADDR = 0x8915  # netdevice(7)
_DNS_SECONDS = 1.0  # with the start of a process; a client of a TCPStore would wait for ten


def with_address(address: str) -> str:
    """The name of the interface with this address, for gloo; '' if there is none that can be asked."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        try:
            with open("/proc/net/if_inet6") as lines:
                return next((line.split()[-1] for line in lines if line.startswith(wanted)), "")
        except OSError:
            return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none, or this is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def dns_is_slow(address: str) -> bool:
    """Does it take long to learn the name of this address? Then nobody answers, and each client of a TCPStore would ask
    for it again: by its IPv6 form, which /etc/hosts does not have.

    Another process asks. The C library reads RES_OPTIONS with a process's first question, and keeps what it has read:
    tcp_store (_process/tcp_store.py) could not have it ask nobody any more.
    """
    question = f"import socket; socket.getnameinfo(('::ffff:{address}', 0, 0, 0), socket.NI_NAMEREQD)"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", question], stderr=subprocess.DEVNULL) as asking:
        try:
            asking.wait(_DNS_SECONDS)
        except subprocess.TimeoutExpired:
            asking.kill()
            return True
    return False
