"""The error of this package."""


class ServingError(ValueError):
    """An input is impossible; the message names it, and what was expected and found."""
