"""The page's pure modules, in the browser that runs them: numbers, a job's model, the layout of cells."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page

from tests.web import display
from tests.web.browser import Scheme, browsing, in_browser
from tests.web.fleet import fleet

pytestmark = in_browser

NARROW = "\N{NARROW NO-BREAK SPACE}"
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


@pytest_asyncio.fixture(loop_scope="session")
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with fleet(tmp_path, []) as site, browsing() as page:
        await page.goto(site.url)
        yield page


async def run(page: Page, module: str, script: str, *arguments: Any) -> Any:
    """Return the result of a module's function with arguments, in the page."""
    call = f"async ([module, given]) => ({script})(await import(`/static/${{module}}.js`), ...given)"
    return await page.evaluate(call, [module, list(arguments)])


NUMBERS: dict[str, list[tuple[list[float], str]]] = {
    "joules": [
        ([0.0251], "25.10 mJ"),
        ([4e-6], "4.000 µJ"),
        ([0.5], "0.500 J"),
        ([797.2], "797 J"),
        ([1663.67], "1.664 kJ"),
        ([2.5e7], "25.00 MJ"),
        *(([value], display.joules(value)) for value in (0.8, 12.3, 99999.0)),
    ],
    "watts": [([88.04], "88.0 W"), ([312.4], "312 W"), ([1583.5], "1.58 kW"), ([3.62e6], "3.62 MW")],
    "seconds": [
        ([0], "0.000 s"),
        ([4.5e-5], "45.00 µs"),
        ([0.0321], "32.10 ms"),
        ([0.7252], "0.725 s"),
        ([99.9], "99.900 s"),
        ([1234.5], "1234.5 s"),
        ([], "–"),
    ],
    "milliseconds": [([1.2e-5], "12.0 µs"), ([0.0183], "18.3 ms"), ([0.2], "200 ms")],
    "span": [([41], "41 s"), ([185], "3 min 05 s"), ([7800], "2 h 10 min"), ([273600], "3 d 4 h")],
    "change": [([0.04], "0.0 %"), ([-0.04], "0.0 %"), ([1.25], "+1.3 %"), ([-1.24], "−1.2 %")],
    "fixed": [([4096], "4096"), ([65536], f"65{NARROW}536"), ([-12345], f"−12{NARROW}345")],
    "kilowattHours": [
        ([0], "0 kWh"),
        ([0.1], "0.100 kWh"),
        ([0.00012345], "0.000123 kWh"),
        ([1234.56], "1234.6 kWh"),
    ],
    "kilowattHoursWithin": [
        ([2, 0.1043], "2.000 ± 0.104 kWh"),
        ([0.0002, 0.000013], "0.000200 ± 0.000013 kWh"),
        ([-1.5, 0.00042], "−1.50000 ± 0.00042 kWh"),
    ],
    "money": [([0], "0"), ([1.005], "1.00"), ([0.00321], "0.00321")],
    "grams": [([0.042], "0.0420 g"), ([400], "400.00 g"), ([1234.5], "1.23 kg"), ([2.5e6], "2.50 t")],
}


async def test_numbers_have_units_and_as_many_digits_as_are_read(page: Page) -> None:
    for name, cases in NUMBERS.items():
        given = [arguments for arguments, _ in cases]
        found = await run(page, "numbers", f"(m, all) => all.map((given) => m.{name}(...given))", given)
        assert found == [text for _, text in cases], name
    assert await run(page, "numbers", "(m) => m.joules(NaN)") == "–"
    ranges = await run(page, "numbers", "(m) => [m.ranges([2, 0, 1, 5]), m.ranges([])]")
    assert ranges == ["0–2, 5", ""]


TOGETHER = "(m, accounts) => JSON.parse(JSON.stringify(m.together(accounts)))"  # without what is not known


async def test_values_unknown_for_one_run_are_unknown_for_the_job(page: Page) -> None:
    counts = ("iteration_count", "unmeasured_iteration_count")
    energies = ("uncompared_energy_kwh", "profiling_energy_kwh", "straggler_energy_kwh")
    zeros = dict.fromkeys((*counts, *energies), 0)
    one = {**zeros, "energy_kwh": 8.0, "saved_energy_kwh": 2.0, "cost": 4.0, "saved_cost": 1.0}
    other = {**zeros, "energy_kwh": 5.0, "uncompared_energy_kwh": 5.0}
    both = await run(page, "ledger", TOGETHER, [one, other])
    neither = await run(page, "ledger", TOGETHER, [other, other])
    rated = {**one, "carbon_g": 800.0, "profiling_energy_kwh": 1.0, "straggler_energy_kwh": 3.0}
    twice = await run(page, "ledger", TOGETHER, [rated, rated])
    assert (both["energy_kwh"], both["saved_energy_kwh"], both["saved_percent"]) == (13.0, 2.0, 20.0)
    assert not {"cost", "saved_cost", "carbon_g", "price_per_kwh"} & set(both)
    assert (twice["profiling_energy_kwh"], twice["straggler_energy_kwh"]) == (2.0, 6.0)
    assert (twice["price_per_kwh"], twice["intensity_g_per_kwh"]) == (0.5, 100.0)
    assert neither["uncompared_energy_kwh"] == 10.0
    assert not {"saved_energy_kwh", "saved_percent"} & set(neither)


async def test_periods_are_those_of_utc(page: Page) -> None:
    for name, now, words in [
        ("today", "2026-11-22T23:59:59Z", "2026-11-22 00:00 UTC to now"),
        ("week", "2026-03-02T00:30:00Z", "2026-02-23 00:00 UTC to now"),
        ("month", "2026-11-01T00:00:00Z", "2026-11-01 00:00 UTC to now"),
        ("last-month", "2027-01-01T00:00:00Z", "2026-12-01 00:00 to 2027-01-01 00:00 UTC"),
        ("last-month", "2028-03-31T12:00:00Z", "2028-02-01 00:00 to 2028-03-01 00:00 UTC"),
    ]:
        script = "(m, name, now) => m.periodWords(m.period(name, Date.parse(now)))"
        assert await run(page, "ledger", script, name, now) == words


def iteration(number: int, pipeline: int, time_s: float = 1.0, energy_j: float = 100.0) -> dict[str, Any]:
    reported = {"iteration": str(number), "pipeline": pipeline, "plan_version": "1"}
    return {"iteration": {**reported, "iteration_time_s": time_s, "energy_j": energy_j}}


MODEL = """(m, updates) => {
  const model = new m.JobModel();
  for (const update of updates) model.take(update);
  return {
    iterations: model.iterations().map(({ number, time_s, energy_j }) => [number, time_s, energy_j]),
    events: model.events.map((event) => event.sequence),
    power_w: model.power_w(),
    missed: [model.missedEvents, model.missedIterations],
  };
}"""

JOB = {"job": {"run_number": 1, "epoch": "e", "parallelism": {"pipeline_count": 2}}}


async def test_an_iteration_counts_when_all_pipelines_reported_it_or_were_overtaken(page: Page) -> None:
    updates = [JOB, iteration(0, 0, 1.0), iteration(0, 1, 1.2), iteration(1, 0)]
    found = await run(page, "job_model", MODEL, updates)
    assert found["iterations"] == [[0, 1.2, 200]]
    assert found["power_w"] == pytest.approx(200 / 1.2)
    # A slow reader does not get all reports: the energy is scaled up to all pipelines.
    found = await run(page, "job_model", MODEL, [*updates, iteration(3, 0)])
    assert found["iterations"] == [[0, 1.2, 200], [1, 1.0, 200]]


async def test_an_iteration_that_is_repeated_replaces_the_one_before(page: Page) -> None:
    updates = [JOB, iteration(0, 0, 9.0), iteration(0, 1, 9.0), iteration(0, 0, 1.0), iteration(0, 1, 1.1)]
    assert (await run(page, "job_model", MODEL, updates))["iterations"] == [[0, 1.1, 200]]


async def test_events_are_kept_once_and_go_with_their_run(page: Page) -> None:
    event = {"type": "JOB_EVENT_TYPE_REGISTERED", "message": "", "create_time": ""}
    updates = [JOB, *({"event": {**event, "sequence": str(number)}} for number in (1, 2, 1, 2, 3))]
    gap = {"first_missed_sequence": "4", "last_missed_sequence": "6", "missed_iteration_count": "7"}
    found = await run(page, "job_model", MODEL, [*updates, {"gap": gap}])
    assert found["events"] == ["1", "2", "3"]
    assert found["missed"] == [3, 7]
    other = {"job": {**JOB["job"], "run_number": 2}}
    assert (await run(page, "job_model", MODEL, [*updates, other]))["events"] == []


FOUND_AGAIN = """(m, shape, width) => {
  const grid = new m.RanksGrid(shape);
  grid.fit(width);
  const lost = [];
  for (let pipeline = 0; pipeline < shape[0]; pipeline += 1)
    for (let stage = 0; stage < shape[1]; stage += 1)
      for (let tensor = 0; tensor < shape[2]; tensor += 1) {
        const cell = grid.cell(pipeline, stage, tensor);
        const { x, y, width: across, height } = grid.box(cell);
        const isFound = grid.at(x + across / 2, y + height / 2) === cell;
        if (!isFound || x + across > width) lost.push([pipeline, stage, tensor]);
      }
  return lost;
}"""


async def test_every_rank_is_found_where_it_is_drawn(page: Page) -> None:
    for shape in ((1, 1, 1), (2, 4, 1), (64, 16, 4), (512, 1, 8), (3, 64, 7)):
        for width in (320, 768, 1400):
            assert await run(page, "ranks_grid", FOUND_AGAIN, list(shape), width) == [], (shape, width)


WALK = """(m, keys) => {
  const grid = new m.RanksGrid([5, 2, 2]);
  grid.fit(120);
  let cell = null;
  return keys.map((key) => {
    cell = grid.next(cell, key);
    return [cell.pipeline, cell.stage, cell.tensor];
  });
}"""


async def test_keys_move_through_bands_and_stay_inside(page: Page) -> None:
    keys = ["ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowDown", "End", "ArrowDown", "Home"]
    assert await run(page, "ranks_grid", WALK, keys) == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
        [1, 0, 0],
        [1, 1, 0],
        [4, 1, 1],
        [4, 1, 1],
        [0, 1, 0],
    ]


async def test_values_differ_by_lightness_alone(page: Page) -> None:
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme)
        for name in ("heat", "cool"):
            script = "(m, name) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map(m.ramp(name, 0, 8))"
            colours = await run(page, "scales", script, name)
            lightness = [_luminance(colour) for colour in colours]
            assert lightness == sorted(set(lightness), reverse=scheme == "light")


def _luminance(colour: str) -> float:
    channels = [int(each) / 255 for each in colour.removeprefix("rgb(").removesuffix(")").split()]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


WORDS = "(m, job) => [m.policy(job.policy), m.signalTarget(job)]"


async def test_a_policy_with_a_signal_is_described_in_words(page: Page) -> None:
    work = {"iteration_count": "40", "end_time": "2027-01-15T08:00:00Z"}
    following = {"state": "SIGNAL_TARGET_STATE_FOLLOWING", "iteration_count": 82285.7, "done_count": "1200"}
    cases: list[tuple[dict[str, Any], dict[str, Any] | None, str, str]] = [
        (
            {"least_carbon": {"extra_time": {"percent": 5, "horizon_s": 86_400}}},
            {**following, "iteration_time_s": 1.0},
            "least carbon within 5 % more time over 1 d 0 h",
            "iterations of 1.100 s; 1200 of 82",
        ),
        (
            {"least_cost": {"work_until": work}},
            {**following, "state": "SIGNAL_TARGET_STATE_NO_SIGNAL"},
            "least cost for 40 iterations until 2027-01-15T08:00:00Z",
            "the signal is unknown: no slowdown; 1200 of 82",
        ),
        ({"least_cost": {"work_until": work}}, following, "least cost for 40", "no slowdown now; 1200 of 82"),
        ({}, None, "no slowdown", ""),
    ]
    for policy, signal_target, rule, note in cases:
        shown_rule, shown_note = await run(
            page,
            "words",
            WORDS,
            {"policy": policy, "signal_target": signal_target, "iteration_overhead_s": 0.1},
        )
        assert shown_rule.startswith(rule)
        assert shown_note.startswith(note)
