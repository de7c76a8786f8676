"""Addresses as gRPC writes them, and which of them never leave the machine."""

import ipaddress

_LOCAL_SCHEMES = ("unix:", "unix-abstract:")
_OTHER_SCHEMES = ("dns:", "ipv4:", "ipv6:")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host (IPv6 without brackets) and port of an address; None if it is a Unix socket's, or none at all."""
    if address.startswith(_LOCAL_SCHEMES):
        return None
    for scheme in _OTHER_SCHEMES:
        address = address.removeprefix(scheme)
    if address.startswith("//"):  # dns://authority/host:port
        address = address[2:].partition("/")[2]
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: str) -> bool:
    """Whether what is said there stays on this machine: a Unix socket, or loopback."""
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
