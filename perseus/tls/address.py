"""Addresses as gRPC writes them, and which of them never leave the machine."""

import ipaddress
import os
import re

_LOCAL_SCHEMES = ("unix:", "unix-abstract:")
OTHER_SCHEMES = ("dns:", "ipv4:", "ipv6:")
_MAX_PATH_BYTES = 107  # sockaddr_un, less the final zero
# Letters of every script, and '_', which DNS allows although host names do not; a '*' listens everywhere.
_HOST = re.compile(r"\*|(?=.{1,253}\.?$)[\w-]{1,63}(\.[\w-]{1,63})*\.?")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return host (IPv6 without brackets) and port of an address; None for a Unix socket or no address."""
    if address.startswith(_LOCAL_SCHEMES):
        return None
    for scheme in OTHER_SCHEMES:
        address = address.removeprefix(scheme)
    if address.startswith("//"):  # dns://authority/host:port
        address = address[2:].partition("/")[2]
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_address(address: str, *, min_port: int = 1) -> str:
    """Return a valid coordinator address: HOST:PORT, unix:PATH, or another form of gRPC.

    Raises:
        ValueError: it is not one; the text has the expected form.
    """
    if address.startswith(_LOCAL_SCHEMES):
        path = address.partition(":")[2].removeprefix("//")
        size = len(os.fsencode(path))
        if not 0 < size <= _MAX_PATH_BYTES or "\0" in path:
            raise ValueError(f"expected unix:PATH with a path of 1 to {_MAX_PATH_BYTES} bytes")
        return address
    found = host_and_port(address)
    if found is None or not found[0]:
        raise ValueError(f"expected HOST:PORT with a port from {min_port} to 65535, or unix:PATH")
    host, port = found
    if port < min_port:
        raise ValueError(f"expected a port from {min_port} to 65535")
    if address.startswith(OTHER_SCHEMES):
        return address  # it may list several, or name a resolver: gRPC checks it
    is_bracketed = "[" in address or "]" in address
    try:
        is_v6 = isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        is_v6 = False
    if is_v6 and not is_bracketed:
        raise ValueError("expected [HOST]:PORT around an IPv6 address")
    if not is_v6 and (is_bracketed or not _HOST.fullmatch(host)):
        raise ValueError("expected a host name, or an address (an IPv6 one in brackets), before the port")
    return address


def several(addresses: str) -> list[str]:
    """Return the addresses of a list with commas."""
    return [address.strip() for address in addresses.split(",")]


def is_local(addresses: str) -> bool:
    """Whether traffic to all of these addresses stays on this machine: Unix sockets or loopback."""
    return all(_is_local(address) for address in several(addresses))


def _is_local(address: str) -> bool:
    if address.startswith(_LOCAL_SCHEMES):
        return True
    found = host_and_port(address)
    if found is None:
        return False
    host = found[0].lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
