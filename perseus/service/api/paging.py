"""Pages of listings: the requested page, its items, and the token of the next page.

Every listing has a `page_size` and a `page_token`. A token encodes where the previous page ended, and its
request: the type, and all fields besides these two. The token of another request is refused, as it would
begin somewhere in the wrong list.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

from google.protobuf.message import Message

from perseus.service.domain.errors import InvalidFieldError

Item = TypeVar("Item", bound=Message)

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

PAGE_BYTES = 2 * 1024 * 1024
"""Bound on a page: it ends before the item that would exceed this. Half of gRPC clients' default limit.

A larger item is a page by itself.
"""

_DIGEST_BYTES = 8
_MAX_NUMBER_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Page:
    """A requested page: at most `size` items after the one at the place `after`, "" for the first page."""

    size: int
    after: str
    _digest: bytes

    @classmethod
    def asked(cls, request: Message) -> Self:
        """Return the page that a request asks for.

        Raises:
            InvalidFieldError: the size is out of range, or the token belongs to another request.
        """
        size, token = request.page_size, request.page_token  # type: ignore[attr-defined]
        if not 0 <= size <= MAX_PAGE_SIZE:
            raise InvalidFieldError(field="page_size", expected=f"0 to {MAX_PAGE_SIZE}", found=size)
        digest = _digest(request)
        return cls(size or DEFAULT_PAGE_SIZE, _decode(token, digest) if token else "", digest)

    @property
    def first_number(self) -> int:
        """The number after the place, where places are numbers from 0.

        Raises:
            InvalidFieldError: the place is not a number.
        """
        if not self.after:
            return 0
        if not (self.after.isascii() and self.after.isdecimal() and len(self.after) <= _MAX_NUMBER_DIGITS):
            raise no_token(self.after)
        return int(self.after) + 1

    def fill(self, items: Iterable[tuple[object, Item]]) -> tuple[list[Item], str]:
        """Take the items of the page from (place, item) pairs, without reading more than necessary.

        Return them, and the token of the next page, which is empty if this is the last.
        """
        page: list[Item] = []
        last, free_bytes = "", PAGE_BYTES
        for place, item in items:
            free_bytes -= item.ByteSize()
            if page and (len(page) == self.size or free_bytes < 0):
                return page, base64.urlsafe_b64encode(self._digest + last.encode()).decode()
            page.append(item)
            last = str(place)
        return page, ""


def _digest(request: Message) -> bytes:
    """Return the digest that all requests for pages of the same listing share."""
    same = type(request)()
    same.CopyFrom(request)
    same.ClearField("page_size")
    same.ClearField("page_token")
    content = same.DESCRIPTOR.full_name.encode() + b"\0" + same.SerializeToString(deterministic=True)
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def _decode(token: str, digest: bytes) -> str:
    try:
        content = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        after = content[_DIGEST_BYTES:].decode()
    except (binascii.Error, UnicodeError):
        raise no_token(token) from None
    if content[:_DIGEST_BYTES] != digest or not after:
        raise no_token(token)
    return after


def no_token(found: str) -> InvalidFieldError:
    """Return the error for an invalid token."""
    return InvalidFieldError(
        field="page_token", expected="a next_page_token of the same request", found=repr(found[:100])
    )
