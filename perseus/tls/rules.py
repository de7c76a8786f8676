"""Which settings of TLS go together, for all who have them: what a value needs, or can't have, beside it.

All raise ValueError, whose text says what was expected; who calls says where.
"""

from perseus.tls.address import is_local


def check_plaintext(address: str, *, has_tls: bool, insecure: bool, wanted: str) -> str:
    """Return an address, unless it leaves this machine in plaintext and nobody said that this is meant.

    `wanted` names the settings that make it TLS.
    """
    if has_tls or insecure or is_local(address):
        return address
    raise ValueError(f"expected {wanted}, or insecure, for what other machines can reach")


def check_together(value: object, other: object, name: str) -> None:
    """Refuse one of two without the other, which `name` names."""
    if (value is None) != (other is None):
        raise ValueError(
            f"expected {name} beside it" if other is None else f"expected a path, as {name} is given"
        )


def check_needs(value: object, other: object, name: str) -> None:
    """Refuse a value without another, which `name` names."""
    if value is not None and other is None:
        raise ValueError(f"expected {name} beside it")


def check_insecure(insecure: bool, tls: object, name: str) -> None:
    """Refuse to allow plaintext where there is TLS, by the setting that `name` names."""
    if insecure and tls is not None:
        raise ValueError(f"expected no {name} beside it")
