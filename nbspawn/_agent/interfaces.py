"""This node's network: the interface with its address, and whether its DNS answers."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading

_SIOCGIFADDR = 0x8915  # netdevice(7)
_DNS_SECONDS = 0.5  # an answer that takes longer is one that a TCPStore's client should not ask for


def with_address(address: str) -> str:
    """The name of the interface with this IPv4 address, for gloo; '' if there is none that can be asked."""
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
    for it again."""
    asking = threading.Thread(target=socket.getfqdn, args=(address,), daemon=True)
    asking.start()
    asking.join(_DNS_SECONDS)
    return asking.is_alive()
