"""Every mistake in a profile CSV is named with file, row and column, what was expected and found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perseus.solver import (
    Kind,
    MeasuredSetting,
    Measurement,
    Pipeline,
    ProfileError,
    ProfileKey,
    one_forward_one_backward,
    plan_at,
    read_profile_csv,
    solve,
)
from perseus.solver.study import envpipe, zeus_global

GOOD = [
    "stage,instruction,frequency,time,energy",
    "0,forward,1410,0.05,20",
    "0,backward,1410,0.09,40",
    "0,forward,1200,0.06,18",
    "0,backward,1200,0.10,36",
    "1,forward,1410,0.05,20",
    "1,backward,1410,0.09,40",
    "1,forward,1200,0.06,18",
    "1,backward,1200,0.10,36",
]


Read = Callable[[list[str]], dict[ProfileKey, tuple[Measurement, ...]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_lines(lines: list[str]) -> dict[ProfileKey, tuple[Measurement, ...]]:
        path = tmp_path / "profile.csv"
        path.write_text("\n".join(lines) + "\n")
        return read_profile_csv(path, 8)

    return read_lines


def test_reads_energies_of_the_whole_stage(read: Read) -> None:
    profiles = read(GOOD)
    assert set(profiles) == {(s, 0, kind) for s in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert profiles[1, 0, Kind.BACKWARD] == (Measurement(1200, 0.10, 288.0), Measurement(1410, 0.09, 320.0))


TURNED = [",".join(reversed(line.split(","))) for line in GOOD]


@pytest.mark.parametrize(
    "alike",
    [
        pytest.param([TURNED[0], *reversed(TURNED[1:])], id="rows and columns in another order"),
        pytest.param(["\ufeff" + GOOD[0], *GOOD[1:]], id="a byte order mark"),
        pytest.param(
            [f",{GOOD[0]},time_se,energy_se", *(f"{i},{row},," for i, row in enumerate(GOOD[1:]))],
            id="standard errors, and an index without a name",
        ),
    ],
)
def test_tables_that_read_alike(read: Read, alike: list[str]) -> None:
    assert read(alike) == read(GOOD)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0,forward,1410,nan,20",
            "row 2, column time: expected a positive, finite number of seconds, found 'nan'",
        ),
        (
            "0,forward,1410,0.05,inf",
            "row 2, column energy: expected a positive, finite number of joules, found 'inf'",
        ),
        (
            "0,forward,1410,1e308,20",
            r"row 2, column time: expected from 1e-12 to 1e\+06 seconds, found '1e308'",
        ),
        ("0,forward,1410,0.05,1e308", r"row 2, column energy: expected from 1.25e-13 to 1.25e\+14 joules"),
        ("0,forward,100001,0.05,20", "row 2, column frequency: expected a whole number of at most 100000"),
        ("1e300,forward,1410,0.05,20", "row 2, column stage: expected a whole number of at most 4095"),
        ("0,forward,1410,-0.05,20", "row 2, column time: .* found '-0.05'"),
        ("0,forward,1410,0,20", "row 2, column time: .* found '0'"),
        ("0,forward,1410,0.05,", "row 2, column energy: .* found ''"),
        ("0,forward,1410,fast,20", "row 2, column time: .* found 'fast'"),
        (
            "0,forward,1410.5,0.05,20",
            "row 2, column frequency: expected a whole number of at least 1, found '1410.5'",
        ),
        ("0,forward,0,0.05,20", "row 2, column frequency: .* found '0'"),
        ("-1,forward,1410,0.05,20", "row 2, column stage: expected a whole number of at least 0, found '-1'"),
        (
            "0,sideways,1410,0.05,20",
            "row 2, column instruction: expected one of forward, backward, .*, found 'sideways'",
        ),
        ("0,forward,1410,0.05", "row 2, column energy: expected a value, found nothing"),
        ("0,forward,1410,0.05,20,7", "row 2, column after the last: expected nothing, found '7'"),
    ],
)
def test_bad_cells(read: Read, row: str, message: str) -> None:
    with pytest.raises(ProfileError, match=rf"profile\.csv, {message}"):
        read([GOOD[0], row, *GOOD[2:]])


def test_duplicate_rows(read: Read) -> None:
    with pytest.raises(
        ProfileError, match=r"row 10, column frequency: .*found the same as in row 3"
    ) as caught:
        read([*GOOD, GOOD[2]])
    assert caught.value.details["row"] == "10"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "expected the columns stage,.* found an empty file"),
        (GOOD[:1], "expected at least one row below the header, found none"),
        (["stage,instruction,clock,time,energy", *GOOD[1:]], "row 1: .* found no frequency in stage,"),
        (
            [*GOOD[:6], *GOOD[7:]],
            "expected stage 1 backward at the stage's highest clock, 1410 MHz, found 1200 MHz as its highest",
        ),
        (
            [row for row in GOOD if not row.startswith("1,backward")],
            "expected stage 1 backward .* found no row$",
        ),
        ([row for row in GOOD if not row.startswith("0,")], "expected stage 0 forward, found no row$"),
    ],
)
def test_missing_parts(read: Read, lines: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read(lines)


def test_computations_have_their_own_clocks(read: Read) -> None:
    """As after a scan that ended for each computation where its energy rose."""
    profiles = read([*GOOD[:-1], "0,backward,1100,0.11,35"])
    pipeline = Pipeline(one_forward_one_backward(2, 4), profiles, (60.0, 60.0))
    frontier = solve(pipeline, point_count=5)
    clocks_mhz = {key: sorted({m.clock_mhz for m in some}, reverse=True) for key, some in profiles.items()}
    assert clocks_mhz == {
        (0, 0, Kind.FORWARD): [1410, 1200],
        (0, 0, Kind.BACKWARD): [1410, 1200, 1100],
        (1, 0, Kind.FORWARD): [1410, 1200],
        (1, 0, Kind.BACKWARD): [1410],
    }
    slowest = plan_at(pipeline, frontier.points[-1].iteration_time_s)
    for c, clock_mhz in slowest.clocks_mhz.items():
        assert clock_mhz == clocks_mhz[c.stage, c.chunk, c.kind][-1]
    assert {clock for plan in zeus_global(pipeline) for clock in plan.clocks_mhz.values()} == {1410}
    assert envpipe(pipeline).iteration_time_s >= frontier.baseline.iteration_time_s


WITH_LIMIT = [f"{GOOD[0]},power_limit_w,kernel", *(f"{row},300,split" for row in GOOD[1:])]


def test_other_columns_are_further_settings(read: Read) -> None:
    profiles = read(
        [*WITH_LIMIT, "0,forward,1410,0.055,17,250.5,split", "0,forward,1410,0.054,18,300, fused "]
    )

    def measured(clock_mhz: int, time_s: float, energy_j: float, limit_w: float, kernel: str) -> object:
        further = (("power_limit_w", limit_w), ("kernel", kernel))
        return MeasuredSetting(clock_mhz, time_s, energy_j, further=further)

    assert profiles[0, 0, Kind.FORWARD] == (
        measured(1200, 0.06, 144.0, 300.0, "split"),
        measured(1410, 0.055, 136.0, 250.5, "split"),
        measured(1410, 0.054, 144.0, 300.0, "fused"),
        measured(1410, 0.05, 160.0, 300.0, "split"),
    )


def test_not_every_setting_need_be_measured_of_every_computation(read: Read) -> None:
    only_here = "0,forward,1410,0.055,17,250,split"
    assert read([*WITH_LIMIT, only_here]).keys() == read(WITH_LIMIT).keys()
    without = [row for row in WITH_LIMIT if not row.startswith("1,backward,1410")]
    with pytest.raises(ProfileError, match=r"expected stage 1 backward at .* found 1200 MHz as its highest"):
        read([*without, only_here])


@pytest.mark.parametrize(
    ("columns", "cells", "message"),
    [
        ("power_limit_w", "", r"row 3, column power_limit_w: expected a finite number of watts .*, found ''"),
        ("power_limit_w", "250 W", "row 3, column power_limit_w: expected .* watts .*, found '250 W'"),
        ("kernel", " ", "row 3, column kernel: expected a printable text of 1 to 200 characters, found ''"),
        ("kernel,power_limit_w", "250", "row 3, column power_limit_w: expected a value, found nothing"),
        ("kernel", "250,7", "row 3, column after the last: expected nothing, found '7'"),
        ("kernel,kernel", "250,250", "row 1, column kernel: expected each column once, found it 2 times"),
        ("energy", "250", "row 1, column energy: expected each column once, found it 2 times"),
        ("time_se_s", "250", "row 1: further setting time_se_s: expected another name"),
        (" kernel", "a", "row 1: further setting: expected a printable name .* without spaces .* ' kernel'"),
    ],
)
def test_bad_further_settings(read: Read, columns: str, cells: str, message: str) -> None:
    good = ",".join("250" for _ in columns.split(","))
    rows = [f"{GOOD[0]},{columns}", f"{GOOD[1]},{good}", f"{GOOD[2]},{cells}"]
    with pytest.raises(ProfileError, match=rf"profile\.csv, {message}"):
        read([*rows, *(f"{row},{good}" for row in GOOD[3:])])


@pytest.mark.parametrize("again", ["300,split", "300.0,split", "3e2, split "])
def test_a_repeated_setting_is_refused(read: Read, again: str) -> None:
    with pytest.raises(
        ProfileError,
        match=r"row 10, column frequency,power_limit_w,kernel: expected one row per stage, instruction and "
        r"setting, found the same as in row 3",
    ):
        read([*WITH_LIMIT, f"{GOOD[2]},{again}"])


@pytest.mark.parametrize(
    ("content", "gpus_per_stage", "message"),
    [
        ("\n".join(GOOD).encode("utf-16"), 8, r"profile\.csv: expected UTF-8 text, found byte 0xff"),
        (f'{GOOD[0]}\n0,"forward'.encode(), 8, r"profile\.csv, row 2: expected CSV"),
        (None, 8, r"profile\.csv: expected a readable file, found: No such file"),
        (b"", 0, "gpus_per_stage: expected at least 1, found 0"),
    ],
)
def test_what_is_no_profile_is_refused(
    tmp_path: Path, content: bytes | None, gpus_per_stage: int, message: str
) -> None:
    path = tmp_path / "profile.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        read_profile_csv(path, gpus_per_stage)


def test_chunks_and_split_backwards(read: Read) -> None:
    head, *_ = GOOD
    kinds = ("forward", "backward-input", "backward-weight")
    rows = [f"0,{kind},1410,0.05,20,{chunk}" for kind in kinds for chunk in (1, 0)]
    found = read([f"{head.strip()},chunk", *rows])
    assert list(found) == [(0, chunk, Kind(kind)) for chunk in (0, 1) for kind in kinds]
    with pytest.raises(ProfileError, match=r"expected stage 0 chunk 1 backward at the .* found no row$"):
        read([f"{head.strip()},chunk", *rows[:2], *rows[3:]])
    with pytest.raises(ProfileError, match="column chunk: expected a whole number of at most 255"):
        read([f"{head.strip()},chunk", "0,forward,1410,0.05,20,256"])
