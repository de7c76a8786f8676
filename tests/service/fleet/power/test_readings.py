"""What agents tell of their GPUs, added up by job and feed."""

import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power_reading import PowerReading
from perseus.service.fleet.power.readings import KEPT_S, Drawn, PowerReadings, completed_w

JOBS = {"a0": "a", "a1": "a", "b0": "b", "over": "c"}
SERVED = {"one": {"a", "b"}, "two": {"a"}, "liar": {"b"}}


def drawn(readings: PowerReadings, now_s: float = 0.0) -> Drawn:
    return readings.drawn(now_s, JOBS.get, lambda instance_id: SERVED.get(instance_id, ()), {"a", "b"})


def reading(**powers_w: float) -> PowerReading:
    return PowerReading(1.0, list(powers_w), list(powers_w.values()))


def test_powers_count_for_the_job_on_each_gpu_and_for_the_feed_of_its_host() -> None:
    readings = PowerReadings()
    readings.take("one", "north", reading(a0=300.0, b0=200.0, idle=60.0), 0.0)
    readings.take("two", "south", reading(a1=310.0, over=70.0), 0.0)
    found = drawn(readings)
    assert found.jobs_w == {"a": {"north": 300.0, "south": 310.0}, "b": {"north": 200.0}}
    assert found.gpu_counts == {"a": {"north": 1, "south": 1}, "b": {"north": 1}}
    assert found.others_w == {"north": 60.0, "south": 70.0}, "the job of one of them is over"


def test_a_gpu_that_two_agents_see_counts_once() -> None:
    readings = PowerReadings()
    for instance_id in ("one", "two"):
        readings.take(instance_id, "north", reading(idle=60.0), 0.0)
    assert drawn(readings).others_w == {"north": 60.0}


def test_an_agent_speaks_for_no_job_that_it_does_not_serve() -> None:
    readings = PowerReadings()
    readings.take("one", "north", reading(a0=300.0), 0.0)
    readings.take("liar", "north", reading(a0=9000.0, a1=9000.0), 0.0)
    found = drawn(readings)
    assert found.jobs_w == {"a": {"north": 300.0}}
    assert found.others_w == {}


def test_the_latest_reading_counts_and_only_for_a_few_seconds() -> None:
    readings = PowerReadings()
    readings.take("one", "north", reading(a0=300.0, idle=60.0), 0.0)
    readings.take("one", "north", reading(a0=280.0), 1.0)
    assert drawn(readings, 1.0 + KEPT_S - 0.1).jobs_w == {"a": {"north": 280.0}}
    assert drawn(readings, 1.0 + KEPT_S) == Drawn()


def test_gpus_that_no_agent_tells_of_count_with_what_their_iterations_drew() -> None:
    gpus, iteration_w = {"north": 4.0, "south": 2.0}, {"north": 1000.0, "south": 500.0}
    told = ({"north": 1200.0, "south": 700.0}, {"north": 4, "south": 2})
    assert completed_w(*told, iteration_w, gpus) == (told[0], True)
    assert completed_w({"north": 300.0}, {"north": 1}, iteration_w, gpus) == (
        {"north": 1050.0, "south": 500.0},
        False,
    )
    assert completed_w({}, {}, iteration_w, gpus) == (iteration_w, False), "as ever"


@pytest.mark.parametrize(
    ("figures", "field"),
    [
        ((0.0, ["g"], [1.0]), "power_reading.duration_s"),
        ((float("nan"), ["g"], [1.0]), "power_reading.duration_s"),
        ((1.0, ["g"], []), "power_reading.power_w"),
        ((1.0, ["g"], [-1.0]), "power_reading.power_w[0]"),
        ((1.0, ["g", "h"], [1.0, 1e8]), "power_reading.power_w[1]"),
        ((1.0, ["g", ""], [1.0, 1.0]), "power_reading.gpu_uuid[1]"),
        ((1.0, ["g", "g"], [1.0, 1.0]), "power_reading.gpu_uuid"),
        ((1.0, [f"g{n}" for n in range(257)], [1.0] * 257), "power_reading.gpu_uuid"),
    ],
)
def test_what_no_reading_can_say_is_refused(
    figures: tuple[float, list[str], list[float]], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        PowerReading(*figures)
    assert caught.value.field == field
