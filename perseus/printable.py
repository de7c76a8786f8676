"""Text of others, as it may be shown: nothing in it moves a cursor, hides, or looks like something else.

What is not printable (control characters and with them terminal escapes, direction marks, what has no width)
is shown as its escape; nothing is left out, and a line stays a line.
"""


def printable(text: str) -> str:
    """Return a text with `\\x1b` or `\\u202e`, say, in place of every character that is not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
