"""Profiles as files: what is written is read, and each mistake is one clear error."""

import numpy as np
import pytest

from perseus.serving.errors import ServingError
from perseus.serving.model import MeasuredStep
from perseus.serving.profile_csv import for_gpu, read_profile
from tests.serving.profiles import CLOCKS_MHZ, measured, model

HEADER = "clock_mhz,prefill_tokens,decoding_count,context_tokens,time_s,energy_j\n"
IDLE = "1410,0,0,0,2,120\n"


def text(steps: list[MeasuredStep]) -> str:
    rows = (
        f"{s.clock_mhz},{s.prefill_tokens},{s.decoding_count},{s.context_tokens},{s.time_s},{s.energy_j}"
        for s in steps
    )
    return HEADER + IDLE + "\n".join(rows)


def test_a_written_profile_is_read() -> None:
    found, expected = read_profile(text(measured()), "p.csv"), model()
    assert found.idle_power_w == 60
    assert np.allclose(found.time_weights, expected.time_weights)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "p.csv: line 1: expected columns clock_mhz"),
        (HEADER + "1410,1,0,0,fast,3\n", "p.csv: line 2: expected numbers, .*fast"),
        (HEADER + IDLE + "1410,1,0,0,0,3\n", "p.csv: line 3: expected numbers, time and energy above 0"),
        (HEADER + "1410,1,0,0\n", "p.csv: line 2"),
        (HEADER + "inf,1,0,0,1,1\n", "p.csv: line 2"),
        (HEADER + "1410,1,0,0,1,3\n", "p.csv: expected a row of the idle engine"),
        (HEADER + IDLE + "1410,1,0,0,1,3\n", "p.csv: profile: expected steps at two clocks"),
        (HEADER + IDLE + "1410,-1,0,0,1,3\n", "p.csv: step: expected at least one token"),
    ],
)
def test_a_mistake_is_one_clear_error(content: str, expected: str) -> None:
    with pytest.raises(ServingError, match=expected):
        read_profile(content, "p.csv")


def test_clocks_of_a_gpu_are_thinned_and_include_its_highest() -> None:
    chosen = for_gpu(model(), range(1410, 209, -15)).clocks_mhz
    assert len(chosen) == 16
    assert (chosen[0], chosen[-1]) == (CLOCKS_MHZ[0], 1410)


@pytest.mark.parametrize("supported", [(1980, 1410, 1200), (1410,), (300, 210)])
def test_a_profile_of_another_gpu_is_refused(supported: tuple[int, ...]) -> None:
    with pytest.raises(ServingError, match=r"the GPU's highest clock, .* found 510 to 1410 MHz"):
        for_gpu(model(), supported)
