"""Pages of lists: how long they may be, and the tokens that lead from one to the next."""

import base64
import binascii

from perseus.service.domain.errors import InvalidFieldError

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_MOST_SEQUENCE = 2**63 - 1


def checked_page_size(page_size: int) -> int:
    """Return how many entries a page may have.

    Raises:
        InvalidFieldError: it is not in 0 (for the default) to MAX_PAGE_SIZE.
    """
    size = page_size or DEFAULT_PAGE_SIZE
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidFieldError(field="page_size", expected=f"0 to {MAX_PAGE_SIZE}", found=size)
    return size


def encode_token(last: str) -> str:
    """Return the token of the page that follows an entry."""
    return base64.urlsafe_b64encode(last.encode()).decode()


def decode_token(token: str) -> str:
    """Return the entry that a page follows; empty for the first page.

    Raises:
        InvalidFieldError: it is no token.
    """
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise _bad_token(token) from None


def decode_sequence_token(token: str) -> int:
    """Return the number that a page follows; 0 for the first page.

    Raises:
        InvalidFieldError: it is no token of such a list.
    """
    last = decode_token(token)
    if not last:
        return 0
    if not (last.isascii() and last.isdigit() and len(last) <= 19 and int(last) <= _MOST_SEQUENCE):
        raise _bad_token(token)
    return int(last)


def _bad_token(token: str) -> InvalidFieldError:
    return InvalidFieldError(field="page_token", expected="a next_page_token", found=repr(token))
