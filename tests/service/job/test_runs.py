"""The run that a registration leads to: every possible case, and every part that can differ."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from perseus.service.domain.specification import OperatingPolicy, Parallelism
from perseus.service.job.runs import Begin, Continue, Decision, LatestRun, Refuse, Repeat, decide
from tests.service.service_fakes import make_spec

# (finished, live rank, difference, run that knows the request) of a job whose latest run is the third.
CASES: dict[tuple[bool, bool, str | None, int | None], Decision] = {
    # A request that began or joined an earlier run leads to that one, whatever the job's state now.
    **{
        (has_finished, is_live, difference, 2): Repeat(2)
        for has_finished, is_live, difference in product((False, True), (False, True), (None, "schedule"))
    },
    # The same specification while the run has not finished.
    (False, False, None, None): Continue(),
    (False, True, None, None): Continue(),
    (False, False, None, 3): Continue(),
    (False, True, None, 3): Continue(),
    # Another one.
    (False, True, "schedule", None): Refuse("schedule"),
    (False, True, "schedule", 3): Refuse("schedule"),
    (False, False, "schedule", None): Begin(4, abandons="schedule"),
    (False, False, "schedule", 3): Begin(4, abandons="schedule"),
    # After the end. Ranks may still be live: the job was ended from outside.
    (True, False, None, None): Begin(4),
    (True, True, None, None): Begin(4),
    (True, False, "schedule", None): Begin(4),
    (True, True, "schedule", None): Begin(4),
    (True, False, None, 3): Repeat(3),
    (True, True, None, 3): Repeat(3),
    (True, False, "schedule", 3): Repeat(3),
    (True, True, "schedule", 3): Repeat(3),
}


def test_the_table_has_every_case() -> None:
    everything = product((False, True), (False, True), (None, "schedule"), (None, 2, 3))
    assert set(CASES) == set(everything)


@pytest.mark.parametrize(("case", "expected"), CASES.items())
def test_a_registration_leads_to_the_run_in_the_table(
    case: tuple[bool, bool, str | None, int | None], expected: Decision
) -> None:
    has_finished, is_live, difference, known_to = case
    assert decide(LatestRun(3, has_finished, is_live, difference), known_to) == expected


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (None, {}),
        ("parallelism", {"parallelism": Parallelism(2, 3, 1)}),
        ("schedule", {"schedule": make_spec(microbatches=4).schedule}),
        ("policy", {"policy": OperatingPolicy(max_slowdown_percent=5.0)}),
        ("stage_work", {"stage_work": ("16 layers", "8 layers")}),
    ],
)
def test_the_part_in_which_another_specification_differs(part: str | None, other: dict[str, Any]) -> None:
    spec = replace(make_spec(), stage_work=("12 layers", "12 layers"))
    assert spec.difference(replace(spec, **other)) == part


def test_the_first_registration_of_a_job_begins_its_first_run() -> None:
    assert decide(None, None) == Begin(1)
