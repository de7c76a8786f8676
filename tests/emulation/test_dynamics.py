import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.gpu import EmulatedGpuError
from perseus.emulation.dynamics import NO_CLOCK, GpuState
from perseus.emulation.physics import A40, Work

LOW_MHZ, HIGH_MHZ = 870, 1740
WORK = Work(compute_s=0.06, memory_s=0.04, activity=0.9)


def stock(at_s: float = 50.0) -> GpuState:
    return GpuState(at_s=at_s, counter_origin_s=at_s, clock_mhz=HIGH_MHZ)


def test_work_ends_at_its_exact_moment_however_late_the_state_is_read() -> None:
    state = stock()
    state.begin(WORK)
    assert state.finish_s(A40) == pytest.approx(50.1)
    state.advance(A40, 60.0)
    assert not state.busy
    assert state.energy_j == pytest.approx(
        0.1 * A40.power_w(0.9, HIGH_MHZ) + 9.9 * A40.blocking_power_w(HIGH_MHZ)
    )


def test_work_progresses_by_the_clock_in_force_at_each_moment() -> None:
    state = stock()
    state.begin(WORK)
    state.advance(A40, 50.04)
    state.set_clock(A40, LOW_MHZ)
    # Half done when the low clock comes into force; the other half at 0.06 · 2 + 0.04 = 0.16 s for the whole.
    assert state.finish_s(A40) == pytest.approx(50.05 + 0.08)
    state.advance(A40, 50.2)
    assert state.energy_j == pytest.approx(
        0.05 * A40.power_w(0.9, HIGH_MHZ)
        + 0.08 * A40.power_w(0.9, LOW_MHZ)
        + 0.07 * A40.blocking_power_w(LOW_MHZ)
    )


@pytest.mark.parametrize(
    ("sets", "clocks_mhz"),
    [
        ([(50.0, LOW_MHZ)], [(50.0099, HIGH_MHZ), (50.0101, LOW_MHZ)]),
        ([(50.0, LOW_MHZ), (50.005, 1305)], [(50.012, HIGH_MHZ), (50.016, 1305)]),
    ],
    ids=["the old clock is in force for the latency", "the newest set replaces a pending one"],
)
def test_a_set_takes_its_latency(sets: list[tuple[float, int]], clocks_mhz: list[tuple[float, int]]) -> None:
    state = stock()
    for time_s, clock_mhz in sets:
        state.advance(A40, time_s)
        state.set_clock(A40, clock_mhz)
    assert state.pending_clock_mhz == sets[-1][1]
    for time_s, clock_mhz in clocks_mhz:
        state.advance(A40, time_s)
        assert state.clock_mhz == clock_mhz
    assert state.pending_clock_mhz == NO_CLOCK


def test_a_slowdown_stretches_the_work_and_not_its_power() -> None:
    state = stock()
    state.begin(WORK)
    state.advance(A40, 50.05)
    state.slowdown = 1.5
    assert state.finish_s(A40) == pytest.approx(50.05 + 0.075)
    assert state.power_w(A40) == A40.power_w(0.9, HIGH_MHZ)


def test_the_counter_has_the_energy_of_its_latest_update() -> None:
    state = stock()
    blocking_w = A40.blocking_power_w(HIGH_MHZ)
    seen_j = []
    for now_s in (50.05, 50.099, 50.101, 50.17, 50.205, 53.45):
        state.advance(A40, now_s)
        seen_j.append(state.counter_j)
    assert seen_j == pytest.approx([blocking_w * shown_s for shown_s in (0, 0, 0.1, 0.1, 0.2, 3.4)])


def test_an_update_is_visible_at_its_exact_time() -> None:
    """In floating point (50.3 − 50) / 0.1 is less than 3, and 50 + 3 · 0.1 is 50.3."""
    state = stock()
    for now_s in (50.3, 50.35):
        state.advance(A40, now_s)
        assert state.counter_j == pytest.approx(0.3 * A40.blocking_power_w(HIGH_MHZ))


def test_a_second_computation_at_once_is_refused() -> None:
    state = stock()
    state.begin(WORK)
    state.advance(A40, 50.025)
    with pytest.raises(EmulatedGpuError, match="expected a waiting GPU, found one with 75% of its work"):
        state.begin(WORK)


def test_an_earlier_time_changes_nothing() -> None:
    state = stock()
    state.begin(WORK)
    state.advance(A40, 50.15)
    before = (state.at_s, state.energy_j, state.counter_j)
    state.advance(A40, 50.02)
    assert (state.at_s, state.energy_j, state.counter_j) == before


looks = st.lists(st.floats(0.0001, 0.08), max_size=30)
commands = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.one_of(st.sampled_from(A40.clocks_mhz), st.floats(0.5, 3.0), st.just(WORK)),
    ),
    max_size=8,
)


@given(commands=commands, looks=looks)
def test_the_result_does_not_depend_on_how_often_the_state_is_advanced(
    commands: list[tuple[float, int | float | Work]], looks: list[float]
) -> None:
    lazy, eager = stock(), stock()
    time_s = 50.0
    for delay_s, command in [*commands, (0.5, 1.0)]:
        for look_s in looks:
            if look_s < delay_s:
                eager.advance(A40, time_s + look_s)
        time_s += delay_s
        for state in (lazy, eager):
            state.advance(A40, time_s)
            if isinstance(command, Work):
                if not state.busy:
                    state.begin(command)
            elif isinstance(command, int):
                state.set_clock(A40, command)
            else:
                state.slowdown = command
        assert lazy.clock_mhz == eager.clock_mhz
        assert lazy.remaining == pytest.approx(eager.remaining, abs=1e-9)
        assert lazy.energy_j == pytest.approx(eager.energy_j)
        assert lazy.counter_j == pytest.approx(eager.counter_j)
        assert lazy.finish_s(A40) == pytest.approx(eager.finish_s(A40))


@given(commands=commands)
def test_the_forecast_of_the_end_is_the_end(commands: list[tuple[float, int | float | Work]]) -> None:
    state = stock()
    state.begin(Work(0.5, 0.5))
    for delay_s, command in commands:
        state.advance(A40, state.at_s + delay_s)
        if isinstance(command, int):
            state.set_clock(A40, command)
    end_s = state.finish_s(A40)
    state.advance(A40, end_s - 1e-6)
    assert state.busy == (end_s > state.at_s)
    state.advance(A40, end_s + 1e-6)
    assert not state.busy
