import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.gpu import EmulatedGpuError
from perseus.emulation.physics import A40, A100_SXM, GpuModel, Work
from tests.published_data import PUBLISHED_DATA

PROFILES = PUBLISHED_DATA / "profiles"


def energies_j(model: GpuModel, work: Work) -> dict[int, float]:
    return {
        clock_mhz: model.power_w(work.activity, clock_mhz) * model.time_s(work, clock_mhz)
        for clock_mhz in model.clocks_mhz
    }


@pytest.mark.parametrize("model", [A40, A100_SXM], ids=["a40", "a100-sxm"])
@given(data=st.data())
def test_a_lower_clock_takes_longer_and_draws_less(model: GpuModel, data: st.DataObject) -> None:
    low_mhz, high_mhz = sorted(data.draw(st.lists(st.sampled_from(model.clocks_mhz), min_size=2, max_size=2)))
    seconds = st.floats(0.001, 10)
    work = Work(data.draw(seconds), data.draw(seconds), data.draw(st.floats(0.01, 1)))
    assert model.time_s(work, high_mhz) <= model.time_s(work, low_mhz)
    assert model.power_w(work.activity, low_mhz) <= model.power_w(work.activity, high_mhz)
    assert model.power_w(1.0, model.highest_clock_mhz) == pytest.approx(model.board_power_w)
    assert model.blocking_power_w(low_mhz) <= model.blocking_power_w(high_mhz)
    assert model.time_s(work, model.highest_clock_mhz) == pytest.approx(work.compute_s + work.memory_s)


@pytest.mark.parametrize("model", [A40, A100_SXM], ids=["a40", "a100-sxm"])
@pytest.mark.parametrize("count", [2, 5, 12])
def test_fewer_clocks_are_spread_evenly_over_the_useful_range(model: GpuModel, count: int) -> None:
    few = model.with_clocks(count)
    gaps_mhz = [high - low for high, low in zip(few.clocks_mhz, few.clocks_mhz[1:], strict=False)]
    assert len(few.clocks_mhz) == count
    assert set(few.clocks_mhz) < set(model.clocks_mhz)
    assert few.highest_clock_mhz == model.highest_clock_mhz
    assert min(few.clocks_mhz) == pytest.approx(model.highest_clock_mhz / 2, abs=15)
    assert max(gaps_mhz) - min(gaps_mhz) <= 15
    assert few.power_w(1.0, few.highest_clock_mhz) == model.power_w(1.0, model.highest_clock_mhz)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_an_impossible_number_of_clocks_is_refused(count: int) -> None:
    with pytest.raises(
        EmulatedGpuError, match=f"NVIDIA A40: number of clocks: expected 2 to 59, found {count}"
    ):
        A40.with_clocks(count)


@pytest.mark.parametrize(
    ("compute_s", "memory_s", "activity", "message"),
    [
        (-1.0, 0.0, 1.0, "compute_s: expected a finite number >= 0, found -1.0"),
        (0.1, float("nan"), 1.0, "memory_s: expected a finite number >= 0, found nan"),
        (0.0, 0.0, 1.0, "expected compute_s . memory_s > 0"),
        (0.1, 0.1, 0.0, "activity: expected a number in .0, 1., found 0.0"),
        (0.1, 0.1, 1.5, "activity: expected a number in .0, 1., found 1.5"),
    ],
)
def test_impossible_work_is_refused(compute_s: float, memory_s: float, activity: float, message: str) -> None:
    with pytest.raises(EmulatedGpuError, match=message):
        Work(compute_s, memory_s, activity)


@pytest.mark.parametrize(
    ("model", "file", "instruction", "compute_share"),
    [
        (A40, "gpt3-175b-a40.csv", "forward", 0.4),
        (A40, "gpt3-175b-a40.csv", "backward", 0.3),
        (A100_SXM, "gpt3-175b-a100-sxm.csv", "forward", 0.85),
        (A100_SXM, "gpt3-175b-a100-sxm.csv", "backward", 0.75),
    ],
)
def test_the_clock_of_least_energy_is_where_it_was_measured(
    model: GpuModel, file: str, instruction: str, compute_share: float
) -> None:
    """The A40's compute shares also model its power cap, which flattens its measured times at the top."""
    if not PROFILES.is_dir():
        pytest.skip(f"the published profiles are not at {PROFILES}")
    with (PROFILES / file).open() as lines:
        rows = [
            row for row in csv.DictReader(lines) if (row["stage"], row["instruction"]) == ("3", instruction)
        ]
    measured = {int(row["frequency"]): (float(row["time"]), float(row["energy"])) for row in rows}
    top_s, top_j = measured[max(measured)]
    measured_mhz = min(measured, key=lambda clock_mhz: measured[clock_mhz][1])
    measured_slowdown = measured[measured_mhz][0] / top_s
    measured_saving = 1 - measured[measured_mhz][1] / top_j

    work = Work(compute_share, 1 - compute_share)
    emulated = energies_j(model, work)
    emulated_mhz = min(emulated, key=lambda clock_mhz: emulated[clock_mhz])
    assert emulated_mhz == pytest.approx(measured_mhz, rel=0.2)
    assert model.time_s(work, emulated_mhz) == pytest.approx(measured_slowdown, abs=0.06)
    assert 1 - emulated[emulated_mhz] / emulated[model.highest_clock_mhz] == pytest.approx(
        measured_saving, abs=0.04
    )
