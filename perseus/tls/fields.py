"""TLS settings as fields of a settings model: validators for fields that need or exclude each other.

For `Annotated`. They refer to other fields by name, which must be declared earlier; the rules are in
`tls.rules`.
"""

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, ValidationInfo

from perseus.tls.address import check_address, several
from perseus.tls.rules import check_insecure, check_needs, check_plaintext, check_together


def goes_with(other: str) -> AfterValidator:
    """A path that must be given if and only if `other` is; needs `validate_default`."""
    return _beside(other, check_together)


def needs(other: str) -> AfterValidator:
    """A path that may be given only with `other`."""
    return _beside(other, check_needs)


def contradicts(tls: str) -> AfterValidator:
    """A switch for plaintext that may not be set together with `tls`."""
    return _beside(tls, check_insecure)


def keeps_plaintext_here(
    tls: str, *, wanted: str | None = None, min_port: int = 1, is_list: bool = False
) -> AfterValidator:
    """An optional address that other machines may reach only by TLS, unless `insecure` is set.

    `tls` is the field that enables TLS; `wanted` names the required settings in an error, by default that
    field. With `is_list` it may be several addresses, separated by commas.
    """

    def check(address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        for each in several(address) if is_list else [address]:
            check_address(each, min_port=min_port)
        return check_plaintext(
            address,
            has_tls=info.data.get(tls) is not None,
            insecure=bool(info.data.get("insecure")),
            wanted=wanted or tls,
        )

    return AfterValidator(check)


def _beside(other: str, rule: Callable[[Any, object, str], None]) -> AfterValidator:
    def check(value: object, info: ValidationInfo) -> object:
        rule(value, info.data.get(other), other)
        return value

    return AfterValidator(check)
