"""This host's own addresses: which one the others should dial."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
from typing import Union

from trainkit.base.errors import ConfigError, Exit, TrainkitError

Ip = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class _Socket(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Interface(ctypes.Structure):
    """struct ifaddrs, as getifaddrs(3) gives it on Linux."""


_Interface._fields_ = (
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Socket)),
    ("mask", ctypes.c_void_p),
    ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)
_IS_UP = 0x1


def local_addresses() -> list[tuple[str, str]]:
    """(interface, address) of every interface that is up: IPv4 first, IPv6 without link-local
    ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[tuple[str, Ip]] = []
    at = first
    while at:
        if at.contents.address and at.contents.flags & _IS_UP:
            family = at.contents.address.contents.family
            data = bytes(at.contents.address.contents.data)
            name = os.fsdecode(at.contents.name)
            if family == socket.AF_INET:
                found.append((name, ipaddress.IPv4Address(data[2:6])))
            elif (
                family == socket.AF_INET6
                and not (address := ipaddress.IPv6Address(data[6:22])).is_link_local
            ):
                found.append((name, address))
        at = at.contents.next
    libc.freeifaddrs(first)
    return [
        (name, str(address)) for name, address in sorted(found, key=lambda pair: pair[1].version)
    ]


def local_address_in(wanted: str) -> str:
    """The one address of this host on the interface, or in the network (CIDR), that `wanted`
    names; of an interface, IPv4 before IPv6.

    Raises ConfigError (exit 7) where there is none or more than one, naming what there is.
    """
    here = local_addresses()
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(wanted, strict=False)
        return _only(
            wanted, [(name, a) for name, a in here if ipaddress.ip_address(a) in network], here
        )
    matching = [(name, a) for name, a in here if name == wanted]
    return _only(wanted, [pair for pair in matching if ":" not in pair[1]] or matching, here)


def _only(wanted: str, matching: list[tuple[str, str]], here: list[tuple[str, str]]) -> str:
    if len({address for _, address in matching}) == 1:
        return matching[0][1]
    said = ", ".join(f"{name} {address}" for name, address in matching or here) or "nothing"
    if matching:
        raise ConfigError(
            f"clusters.X.interface {wanted!r} means several addresses here: {said}",
            exit=Exit.HEALTH,
            hint="name a network (CIDR) with one",
        )
    raise ConfigError(
        f"no address here is in clusters.X.interface {wanted!r}; there is {said}",
        exit=Exit.HEALTH,
        hint="name an interface or a network",
    )


def local_address_toward(host: str) -> str:
    """This host's end of the route to `host`; no packet is sent.

    Raises TrainkitError (exit 8) where the name has no address or no route leads there.
    """
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    except OSError as error:
        raise TrainkitError(
            f"{host} has no address here: {error.strerror}",
            exit=Exit.START,
            hint="see the hostfile, /etc/hosts and DNS",
        ) from None
    raise TrainkitError(f"no route leads to {host}", exit=Exit.START, hint="see `ip route`")
