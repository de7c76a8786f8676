"""Safe display of other people's text: nothing in it moves a cursor, hides, or imitates other text.

Characters that are not printable (control characters and thus terminal escapes, direction marks, characters
without width) become escapes; nothing is omitted, and a line stays one line.
"""


def printable(text: str) -> str:
    """Return a text with every unprintable character escaped, such as `\\x1b` or `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def os_error_text(error: OSError) -> str:
    """Return a system error in words: the file and the problem, or the error's own message."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
