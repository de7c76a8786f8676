"""Settings of TLS as fields of a settings model: what each needs, or can't have, beside it.

For `Annotated`. The other fields are named, and are declared before; the rules are those of `tls.rules`.
"""

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, ValidationInfo

from perseus.tls.address import check_address
from perseus.tls.rules import check_insecure, check_needs, check_plaintext, check_together


def goes_with(other: str) -> AfterValidator:
    """A path that is given if and only if `other` is; a field with `validate_default`."""
    return _beside(other, check_together)


def needs(other: str) -> AfterValidator:
    """A path that is only given beside `other`."""
    return _beside(other, check_needs)


def contradicts(tls: str) -> AfterValidator:
    """Whether plaintext is meant, which it can't be where `tls` is given."""
    return _beside(tls, check_insecure)


def keeps_plaintext_here(tls: str, *, wanted: str | None = None, min_port: int = 1) -> AfterValidator:
    """An address, if any, that others reach by TLS only, unless `insecure` says otherwise.

    `tls` is the field that makes it TLS; `wanted` says in an error what to give, by default that field.
    """

    def check(address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        return check_plaintext(
            check_address(address, min_port=min_port),
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
