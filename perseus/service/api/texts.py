"""Checks of every text of a request: its length, and that it is printable.

The contract's descriptors show where texts are, so that no field is forgotten, and messages without texts are
not walked. Further checks of single texts are made where they are translated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perseus.service.domain.bounds import MAX_SENTENCE_LENGTH, check_size, check_text

_MAX_ROWS = 4096
"""Bound on repeated fields that are or contain texts: far above what any may have, and quick to check."""


@dataclass(slots=True)
class _TextFields:
    """The fields of a message that are texts, and those whose messages contain some."""

    texts: list[FieldDescriptor] = field(default_factory=list)
    inner: list[tuple[FieldDescriptor, "_TextFields"]] = field(default_factory=list)


_by_descriptor: dict[str, _TextFields] = {}


def check_texts(message: Message, prefix: str = "") -> None:
    """Refuse a message with a text that is too long or not printable.

    Raises:
        InvalidFieldError: names the field by its path within the message.
    """
    _check(message, _text_fields(cast(Descriptor, message.DESCRIPTOR)), prefix)


def _check(message: Message, text_fields: _TextFields, prefix: str) -> None:
    for each in text_fields.texts:
        value = getattr(message, each.name)
        if each.is_repeated:
            check_size(f"{prefix}{each.name}", len(value), _MAX_ROWS)
            for row, text in enumerate(value):
                check_text(f"{prefix}{each.name}[{row}]", text, maximum=MAX_SENTENCE_LENGTH)
        elif value:
            check_text(f"{prefix}{each.name}", value, maximum=MAX_SENTENCE_LENGTH)
    for each, inner in text_fields.inner:
        if each.is_repeated:
            parts = getattr(message, each.name)
            check_size(f"{prefix}{each.name}", len(parts), _MAX_ROWS)
            for row, part in enumerate(parts):
                _check(part, inner, f"{prefix}{each.name}[{row}].")
        elif message.HasField(each.name):
            _check(getattr(message, each.name), inner, f"{prefix}{each.name}.")


def _text_fields(descriptor: Descriptor) -> _TextFields:
    known = _by_descriptor.get(descriptor.full_name)
    if known is not None:
        return known
    text_fields = _by_descriptor[descriptor.full_name] = _TextFields()
    for each in descriptor.fields:
        if each.type == FieldDescriptor.TYPE_STRING:
            text_fields.texts.append(each)
        elif each.message_type is not None and holds_text(each.message_type):
            text_fields.inner.append((each, _text_fields(each.message_type)))
    return text_fields


def holds_text(descriptor: Descriptor, above: Sequence[str] = ()) -> bool:
    """Return whether a message can contain a text, itself or in one of its messages."""
    if descriptor.full_name in above:
        return False
    return any(
        each.type == FieldDescriptor.TYPE_STRING
        or (each.message_type is not None and holds_text(each.message_type, (*above, descriptor.full_name)))
        for each in descriptor.fields
    )
