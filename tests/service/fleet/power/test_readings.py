"""Agents' readings of GPUs, added up by job and feed."""

import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.power_reading import PowerReading, max_power_w
from perseus.service.fleet.power.readings import KEPT_S, JoinedGpu, PowerReadings, PowerTotals, completed_w

JOINED = {
    "one": {"a0": "a", "b0": "b"},
    "two": {"a1": "a", "over": "c"},
    "thief": {"a0": "t"},
}
ON_GPUS = {"a0": ("a",), "a1": ("a",), "b0": ("b",), "over": ("c",), "shared": ("a", "t")}


def joined(instance_id: str) -> dict[str, JoinedGpu]:
    gpus = JOINED.get(instance_id, {})
    return {gpu_uuid: JoinedGpu(job_id, "NVIDIA A100-SXM4-80GB") for gpu_uuid, job_id in gpus.items()}


def totals(readings: PowerReadings, now_s: float = 0.0) -> PowerTotals:
    return readings.totals(now_s, joined, lambda gpu_uuid: ON_GPUS.get(gpu_uuid, ()), {"a", "b", "t"})


def reading(**powers_w: float) -> PowerReading:
    return PowerReading(1.0, list(powers_w), list(powers_w.values()))


Report = tuple[str, str, PowerReading, bool]
ByJob = dict[str, dict[str, float]]
"""Power by job and feed."""


def of_host(instance_id: str, **powers_w: float) -> Report:
    """What the agent of host north reports of all its GPUs."""
    return instance_id, "north", reading(**powers_w), True


def of_rank(instance_id: str, host: str, **powers_w: float) -> Report:
    """What a job's own agent reports."""
    return instance_id, host, reading(**powers_w), False


ONE = of_rank("one", "north", a0=300.0, b0=200.0)

CASES: dict[str, tuple[list[Report], tuple[ByJob, dict[str, float], dict[str, int]]]] = {
    "powers count for the job on each GPU and for the feed of its host": (
        [of_host("one", a0=300.0, b0=200.0, idle=60.0), of_rank("two", "south", a1=310.0, over=70.0)],
        # The job of one of the others has ended.
        ({"a": {"north": 300.0, "south": 310.0}, "b": {"north": 200.0}}, {"north": 60.0, "south": 70.0}, {}),
    ),
    "a GPU that two agents of its host report counts once": (
        [of_host("daemon", idle=60.0, a0=310.0), of_host("another", idle=60.0, a0=310.0), ONE],
        ({"a": {"north": 310.0}, "b": {"north": 200.0}}, {"north": 60.0}, {}),
    ),
    "an agent reports only joined GPUs unless it is the host's, and other readings are ignored": (
        [ONE, of_rank("liar", "north", a0=9000.0, a1=9000.0, made_up=1e7)],
        ({"a": {"north": 300.0}, "b": {"north": 200.0}}, {}, {}),
    ),
    "a GPU counts with no more than its model can draw and is conflicting": (
        [of_rank("one", "north", a0=1e7), of_host("daemon", idle=1e7)],
        ({"a": {"north": max_power_w("NVIDIA A100-SXM4-80GB")}}, {"north": max_power_w("")}, {"north": 2}),
    ),
    "a GPU reported in two jobs or on two feeds is conflicting, and each job on its own feed": (
        [of_rank("one", "north", a0=300.0), of_rank("thief", "south", a0=350.0)],
        ({"a": {"north": 300.0}, "t": {"south": 350.0}}, {}, {"north": 1, "south": 1}),
    ),
    "a host's agent reports the power of a job if the job's own does not": (
        [of_host("daemon", a0=300.0, shared=310.0, idle=60.0)],
        ({"a": {"north": 300.0}}, {"north": 60.0}, {}),
    ),
    "a tenant does not change the readings of the host's agent": (
        [of_host("daemon", a0=400.0), of_rank("thief", "south", a0=5.0)],
        ({"a": {"north": 400.0}}, {}, {"north": 1, "south": 1}),
    ),
}


@pytest.mark.parametrize(("reports", "expected"), CASES.values(), ids=CASES)
def test_the_power_of_each_gpu_counts_once(
    reports: list[Report], expected: tuple[ByJob, dict[str, float], dict[str, int]]
) -> None:
    readings = PowerReadings()
    for instance_id, host, each, is_of_host in reports:
        readings.take(instance_id, host, each, 0.0, is_of_host=is_of_host)
    jobs_w, others_w, conflicting_counts = expected
    gpu_counts = {job_id: dict.fromkeys(own, 1) for job_id, own in jobs_w.items()}
    assert totals(readings) == PowerTotals(jobs_w, gpu_counts, others_w, conflicting_counts)


def test_readings_of_one_gpu_that_differ_for_long_are_conflicting() -> None:
    readings = PowerReadings()
    counts = []
    for second in range(40):
        # The agents' seconds differ, and the power fluctuates.
        high = second % 2 == 0
        readings.take("daemon", "north", reading(idle=400.0 if high else 100.0), second, is_of_host=True)
        apart_w = 200.0 if second >= 20 else 0.0
        reported_w = (100.0 if high else 400.0) + apart_w
        readings.take("another", "north", reading(idle=reported_w), second, is_of_host=True)
        counts.append(totals(readings, second).conflicting_counts.get("north", 0))
    assert counts[:20] == [0] * 20
    assert counts[-5:] == [1] * 5


def test_a_reading_is_dropped_when_its_stream_ends() -> None:
    readings = PowerReadings()
    readings.take("one", "north", reading(a0=300.0, idle=60.0), 0.0, is_of_host=True)
    readings.forget("one")
    assert totals(readings) == PowerTotals()


def test_the_latest_reading_counts_and_only_for_a_few_seconds() -> None:
    readings = PowerReadings()
    readings.take("one", "north", reading(a0=300.0, idle=60.0), 0.0, is_of_host=True)
    readings.take("one", "north", reading(a0=280.0), 1.0, is_of_host=True)
    assert totals(readings, 1.0 + KEPT_S - 0.1).jobs_w == {"a": {"north": 280.0}}
    assert totals(readings, 1.0 + KEPT_S) == PowerTotals()


@pytest.mark.parametrize(
    ("model", "board_w"),
    [
        ("NVIDIA A40", 300.0),
        ("NVIDIA H100 80GB HBM3", 700.0),
        ("NVIDIA GB200", 1200.0),
        ("Tesla V100-SXM2-32GB", 350.0),
        ("AMD Instinct MI300X OAM", 750.0),
        ("Emulated", 2000.0),
    ],
)
def test_a_gpus_model_bounds_its_power(model: str, board_w: float) -> None:
    assert max_power_w(model) == 1.25 * board_w


def test_gpus_without_a_reading_count_with_their_iterations_power() -> None:
    gpus, iteration_w = {"north": 4.0, "south": 2.0}, {"north": 1000.0, "south": 500.0}
    reported = ({"north": 1200.0, "south": 700.0}, {"north": 4, "south": 2})
    assert completed_w(*reported, iteration_w, gpus) == (reported[0], True)
    assert completed_w({"north": 300.0}, {"north": 1}, iteration_w, gpus) == (
        {"north": 1050.0, "south": 500.0},
        False,
    )
    assert completed_w({}, {}, iteration_w, gpus) == (iteration_w, False), "without any reading"


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
def test_invalid_readings_are_refused(figures: tuple[float, list[str], list[float]], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        PowerReading(*figures)
    assert caught.value.field == field
