"""Signals from CSV files, and one clear error for each invalid file."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus.service.domain.signals import SignalKind
from perseus.service.signals.csv_file import SignalFileError, read_signal_csv
from tests.published_data import PUBLISHED_DATA

CISO = PUBLISHED_DATA / "carbon" / "ciso-2022.csv"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "signal.csv"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_times_have_three_formats(path: Path) -> None:
    rows = "X,1970-01-01T01:00:00+01:00,1", "X,1970-01-01 01:00,2.5", "X,7200,3"
    signal = read_signal_csv(write(path, "zone,timestamp,g", *rows), SignalKind.CARBON, "g")
    assert signal.times_s == [0.0, 3600.0, 7200.0]
    assert signal.values == [1.0, 2.5, 3.0]
    assert signal.valid_s == 3600


def test_reading_a_fifo_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(SignalFileError, match=r"found: expected a regular file, found prw"):
        read_signal_csv(path, SignalKind.CARBON, "g")


def test_a_row_without_a_value_is_a_gap(path: Path) -> None:
    write(path, "timestamp,g", "0,1", "3600,", "7200,3")
    signal = read_signal_csv(path, SignalKind.CARBON, "g", stale_s=0)
    assert [signal.value_at(time_s) for time_s in (3599, 3600, 7200)] == [1.0, None, 3.0]


@pytest.mark.parametrize(
    ("kind", "unit", "expected"),
    [
        (SignalKind.CARBON, None, 900.0),
        (SignalKind.CARBON, "kg/MWh", 900.0),
        (SignalKind.CARBON, "lbs/MWh", 408.233133),
        (SignalKind.PRICE, "per MWh", 0.9),
    ],
)
def test_values_are_converted_from_their_unit(
    path: Path, kind: SignalKind, unit: str | None, expected: float
) -> None:
    write(path, "timestamp,value", "0,900")
    assert read_signal_csv(path, kind, "value", unit=unit).values == pytest.approx([expected])


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (None, "1003.3", "1000 g/kWh where no unit (g/kWh, kg/MWh, lbs/MWh) is set, found 1003.3 g/kWh"),
        ("g/kWh", "2100", "2000 g/kWh, found 2100 g/kWh"),
        ("lbs/MWh", "5000", "2000 g/kWh, found 2267.96 g/kWh"),
    ],
)
def test_an_intensity_that_no_grid_has_is_refused(
    path: Path, unit: str | None, value: str, text: str
) -> None:
    write(path, "timestamp,MOER", "0,900", f"300,{value}")
    with pytest.raises(SignalFileError) as caught:
        read_signal_csv(path, SignalKind.CARBON, "MOER", unit=unit)
    assert str(caught.value) == f"{path}, line 3, column MOER: expected at most {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("time,g\n0,1\n", "line 1: expected a column timestamp, found time, g"),
        ("timestamp,price\n0,1\n", "line 1: expected a column g, found timestamp, price"),
        ("timestamp,g\n0,1\nsoon,2\n", "line 3, column timestamp: expected a time in ISO 8601, or seconds"),
        ("timestamp,g\n-5,1\n", "line 2, column timestamp: expected 0 to 1e+11 s since 1970, found '-5'"),
        ("timestamp,g\n0,much\n", "line 2, column g: expected a number, or nothing, found 'much'"),
        ("timestamp,g\n0,inf\n", "line 2, column g: expected a number from -1e+06 to 1e+06, found 'inf'"),
        ("timestamp,g\n9,1\n9,1\n", "line 3, column timestamp: expected a later time than in the row before"),
        ("timestamp,g\n9,\n", "column g: expected at least one value, found none"),
        ("timestamp,g\n9,-1\n", "values[0]: expected 0 to 2000, found -1.0"),
        ('timestamp,g\n9,"1\n', "line 2: expected CSV"),
        ("timestamp,g\n0,353\n3600,35", "line 3: expected an end of line, found none"),  # truncated 353
        (None, "expected a readable file, found: No such file"),
    ],
)
def test_the_error_for_an_invalid_signal_names_its_place(path: Path, content: str | None, text: str) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(SignalFileError) as caught:
        read_signal_csv(path, SignalKind.CARBON, "g")
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80))
def test_no_file_raises_anything_else(path: Path, content: bytes) -> None:
    path.write_bytes(b"timestamp,g\n0,1\n" + content)
    with suppress(SignalFileError):
        assert read_signal_csv(path, SignalKind.CARBON, "g").values[0] == 1.0


@pytest.mark.skipif(not CISO.exists(), reason=f"published signal not found at {CISO}")
def test_the_published_year() -> None:
    signal = read_signal_csv(CISO, SignalKind.CARBON, "avg_CI")
    assert (len(signal.values), signal.valid_s) == (8757, 3600), "three hours have no value"
    first_s, hours = signal.hourly(1e11)
    assert (first_s, len(hours)) == (1_640_995_200, 8760), "the hours of 2022"
