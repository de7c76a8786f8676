"""What hooks count is made relative to the baseline's mean, and counts as far as times follow it."""

import pytest

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import StockIteration
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample, IterationColumns
from perseus.service.job.iterations.counted_work import CountedWork
from perseus.solver import Kind


def rows(*works: float, stated: float = 0.0) -> IterationColumns:
    count = len(works)
    columns = [*range(count)], [1] * count, [1.0] * count, [100.0] * count, [True] * count, [0] * count
    return IterationColumns(*columns, work=works, relative_work=[stated] * count if stated else ())


def estimate(work: float) -> EnergyEstimate:
    sample = EnergySample(Kind.FORWARD, 0, 1410, 8, 0.1, 0.001, 30.0, 0.3)
    return EnergyEstimate(1, 4, (sample,), 60.0, 0.5, work=work)


class Job:
    """A job of two stages, the second of whose inputs have 100 times the elements."""

    def __init__(self) -> None:
        self.record = JobRecord(OperatingPolicy())
        self.work = CountedWork(self.record, 2)

    def run(self, *works: float, exponent: float = 1.0) -> list[IterationColumns]:
        found = []
        for number, work in enumerate(works):
            found += [self.work.related(0, rows(work)), self.work.related(1, rows(100 * work))]
            most = max(found[-2].work[0], found[-1].work[0])
            self.work.learn(JobIteration(number, (1,), True, work**exponent, (100.0,), work=most))
        return found

    def measure_baseline(self) -> None:
        self.record.baseline = StockIteration(1.0, 100.0, 0.0)


def test_work_is_relative_to_the_mean_until_the_baseline_is_measured() -> None:
    job = Job()
    job.run(*[10.0, 30.0] * 50)
    job.measure_baseline()
    one, other = job.run(40.0)
    assert (one.work, other.work) == ([2.0], [2.0])
    assert one.relative_work == pytest.approx([2.0], rel=0.05)
    assert job.record.typical_work == (20.0, 2000.0)
    job.run(*[1000.0] * 10)
    assert job.record.typical_work == (20.0, 2000.0), "whatever comes later"
    assert CountedWork(job.record, 2).related(1, rows(1000.0)).work == [0.5], "also after a restart"


def test_work_counts_as_far_as_times_follow_it() -> None:
    for exponent in (0.0, 0.5, 1.5):
        job = Job()
        job.run(*[10.0, 30.0] * 50, exponent=exponent)
        job.measure_baseline()
        (row, _) = job.run(40.0, exponent=exponent)
        assert row.relative_work == pytest.approx([2**exponent], rel=0.05)
        sample = job.work.at_typical(0, estimate(40.0)).samples[0]
        assert sample.time_s == pytest.approx(0.1 / 2**exponent, rel=0.05)
        assert sample.time_se_s / sample.time_s == pytest.approx(0.01)
        assert sample.energy_j / sample.time_s == pytest.approx(300.0)


def test_work_that_a_trainer_states_is_relative_already_and_times_are_in_proportion() -> None:
    job = Job()
    job.run(10.0, 30.0)
    job.measure_baseline()
    stated = job.work.related(0, rows(70.0, stated=1.5))
    assert (stated.work, stated.relative_work) == ((), [1.5])
    assert job.work.at_typical(0, estimate(2.0)).samples[0].time_s == 0.05


def test_what_was_learned_survives_a_restart_and_counting_may_begin_late() -> None:
    job = Job()
    job.run(*[10.0, 30.0] * 50, exponent=0.1)
    job.measure_baseline()
    job.run(20.0, exponent=0.1)
    exponent = job.record.work_exponent
    job.work = CountedWork(job.record, 2)
    job.run(20.0, 21.0, exponent=0.1)
    assert job.record.work_exponent == pytest.approx(exponent, abs=0.02)
    late = Job()
    late.measure_baseline()
    late.run(*[10.0, 30.0] * 2)
    (row, _) = late.run(40.0)
    assert row.work == [2.0]
    assert late.record.typical_work == (20.0, 2000.0)


def test_nothing_is_known_without_work_and_all_is_forgotten_with_the_measurements() -> None:
    job = Job()
    assert job.work.related(0, rows(0.0)).work == ()
    assert job.work.at_typical(0, estimate(0.0)) == estimate(0.0)
    assert job.work.at_typical(0, estimate(5.0)) == estimate(5.0)
    job.run(10.0, 30.0)
    job.measure_baseline()
    job.run(50.0)
    job.work.forget()
    assert (job.record.typical_work, job.record.work_exponent) == ((), 1.0)
