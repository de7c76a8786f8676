"""Conversions to the contract's messages."""

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.messages import _CONTRACT, NUMBERS, time_from_proto, time_to_proto


@pytest.mark.parametrize("members", _CONTRACT)
def test_every_number_of_the_contract_has_its_member(members: type[enum.Enum]) -> None:
    numbers = set(_CONTRACT[members].values()) - {0}
    assert {NUMBERS[member] for member in members} == numbers


@given(st.floats(-1e9, 2e11))
def test_times_come_back_the_same(time_s: float) -> None:
    """A filter that starts at an event's own time must include the event."""
    message = time_to_proto(time_s)
    assert 0 <= message.nanos < 1_000_000_000
    assert time_from_proto("time", message) == pytest.approx(time_s, abs=1e-9)
    if abs(time_s) > 1e8:  # beyond, a float is coarser than a nanosecond
        assert time_from_proto("time", message) == time_s
