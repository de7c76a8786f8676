"""Every parser of untrusted input: what is valid is accepted, any change of it is accepted or refused.

`make fuzz` searches much longer, guided by coverage.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_some_input_is_accepted_to_begin_with(name: str) -> None:
    assert any(list(map(TARGETS[name].run, TARGETS[name].valid)))


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_changed_input_is_accepted_or_refused(name: str, data: st.DataObject) -> None:
    text = bytearray(data.draw(st.sampled_from(TARGETS[name].valid)))
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 8)))
        text[begin:end] = data.draw(st.binary(max_size=8))
    TARGETS[name].run(bytes(text))
