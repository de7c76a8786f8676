"""The contract's own schemas, if the published contract lies beside the checkout."""

from datetime import datetime
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.published_data import PUBLISHED_DATA

CONTRACT = PUBLISHED_DATA / "reference" / "dsx-flex.yaml"

needs_contract = pytest.mark.skipif(
    not CONTRACT.exists(), reason=f"the published contract is not there: {CONTRACT}"
)


FORMATS = Draft202012Validator.FORMAT_CHECKER


def is_moment(found: object) -> bool:
    """Check a date-time: the library needs another library for that."""
    if isinstance(found, str):
        assert datetime.fromisoformat(found).tzinfo is not None
    return True


FORMATS.checks("date-time", raises=(ValueError, AssertionError))(is_moment)


@cache
def validator(schema: str) -> Draft202012Validator:
    """Return a validator for one of `components/schemas` that also checks formats."""
    content: dict[str, Any] = yaml.safe_load(CONTRACT.read_text())
    reference = {"$ref": f"#/components/schemas/{schema}", "components": content["components"]}
    return Draft202012Validator(reference, format_checker=FORMATS)


def problems(schema: str, message: object) -> list[str]:
    """Return the violations in a message."""
    return [f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(message)]
