"""Rules for TLS settings that need or exclude each other, for all programs that have them.

All raise ValueError, whose text has the expectation; the caller adds the place.
"""

from perseus.tls.address import host_and_port, is_local


def check_plaintext(address: str, *, has_tls: bool, insecure: bool, wanted: str) -> str:
    """Return an address, unless its traffic leaves this machine in plaintext without `insecure`.

    `wanted` names the settings that enable TLS.
    """
    if has_tls or insecure or is_local(address):
        return address
    raise ValueError(f"expected {wanted}, or insecure, for an address that other machines can reach")


def check_dask(address: str, *, insecure: bool, wanted: str) -> str:
    """Return a Dask scheduler's address, unless it is none, or in plaintext without `insecure`.

    `wanted` names the flag or setting of `insecure`.
    """
    scheme, _, rest = address.partition("://")
    found = host_and_port(rest)
    if scheme not in ("tls", "tcp") or found is None or not found[0] or not found[1]:
        raise ValueError("expected tls://HOST:PORT")
    if scheme == "tcp" and not insecure:
        raise ValueError(
            f"expected tls://, or {wanted} for plaintext, as Dask runs the code that it receives"
        )
    return address


def check_together(value: object, other: object, name: str) -> None:
    """Refuse one of two values without the other, whose name is `name`."""
    if (value is None) != (other is None):
        raise ValueError(
            f"expected {name} beside it" if other is None else f"expected a path, as {name} is given"
        )


def check_needs(value: object, other: object, name: str) -> None:
    """Refuse a value without another, whose name is `name`."""
    if value is not None and other is None:
        raise ValueError(f"expected {name} beside it")


def check_insecure(insecure: bool, tls: object, name: str) -> None:
    """Refuse to allow plaintext together with TLS, which the setting `name` enables."""
    if insecure and tls is not None:
        raise ValueError(f"expected no {name} beside it")
