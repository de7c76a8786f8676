"""File sources, retries of sources, and sources created from settings."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perseus.service.domain.errors import SignalUnusableError
from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.settings import CoordinatorSettings
from perseus.service.shell.signals import FIRST_DELAY_S, MAX_DELAY_S, retry_of
from perseus.service.signal_settings import SignalSettings
from perseus.service.signals.csv_source import CsvSource
from perseus.service.signals.electricity_maps import ElectricityMaps
from perseus.service.signals.factory import KEY_VARIABLE, open_source
from perseus.service.signals.source import SourceError
from perseus.service.signals.uk_carbon_intensity import UkCarbonIntensity


def write(path: Path, *values: float, time_ns: int) -> None:
    rows = "".join(f"{index * 3600},{value}\n" for index, value in enumerate(values))
    path.write_text(f"timestamp,g\n{rows}")
    os.utime(path, ns=(time_ns, time_ns))


async def values(source: CsvSource, now_s: float = 0.0) -> list[float] | None:
    signal = await source.read(now_s)
    return None if signal is None else list(signal.values)


async def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "carbon.csv"
    source = CsvSource(path, SignalKind.CARBON, "g", HOUR_S)
    with pytest.raises(SourceError, match=r"carbon\.csv: expected a readable file, found: No such file"):
        await source.read(0.0)
    write(path, 1.0, 2.0, time_ns=1)
    assert [await values(source) for _ in range(2)] == [[1.0, 2.0], None]
    write(path, 1.0, 3.0, time_ns=2)
    assert await values(source) == [1.0, 3.0]
    path.write_text("timestamp,g\n0,x\n")
    for _ in range(2):
        with pytest.raises(SourceError, match="line 2, column g: expected a number, or nothing, found 'x'"):
            await source.read(0.0)


async def test_without_a_forecast_rows_count_when_their_time_has_come(tmp_path: Path) -> None:
    write(tmp_path / "carbon.csv", 1.0, 2.0, 3.0, time_ns=1)
    source = CsvSource(tmp_path / "carbon.csv", SignalKind.CARBON, "g", HOUR_S, has_forecast=False)
    found = [await values(source, time_s) for time_s in (0.0, 1.0, HOUR_S, 2 * HOUR_S)]
    assert found == [[1.0], None, [1.0, 2.0], [1.0, 2.0, 3.0]]


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 1))
def test_a_failing_source_is_asked_ever_later_up_to_a_limit(outcomes: list[bool], drawn: float) -> None:
    retry, count = retry_of(900.0, lambda: drawn), 0
    for works in outcomes:
        if works:
            retry.succeeded()
            count = 0
        else:
            max_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**count)
            assert max_s / 2 <= retry.failed() <= max_s
            count += 1
        assert retry.failure_count == count
    assert retry_of(1.0, lambda: drawn).failed() == 1.0


def test_each_kind_of_source_is_opened(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("a-key\n")
    maps = {"kind": "price", "provider": "electricity-maps", "zone": "DE"}
    opened: list[tuple[dict[str, Any], type]] = [
        ({"kind": "carbon", "csv": tmp_path / "x.csv", "column": "g"}, CsvSource),
        ({"kind": "carbon", "provider": "uk-carbon-intensity", "region": 13}, UkCarbonIntensity),
        ({**maps, "key_file": key_file}, ElectricityMaps),
        (maps, ElectricityMaps),
    ]
    for settings, kind in opened:
        source = open_source("grid", SignalSettings(**settings), {KEY_VARIABLE: "another-key"})
        assert type(source) is kind


async def test_a_configured_unit_reaches_the_values(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("timestamp,MOER\n0,1150\n")
    parts = {"kind": "carbon", "csv": tmp_path / "x.csv", "column": "MOER", "unit": "lbs/MWh"}
    signal = await open_source("grid", SignalSettings.model_validate(parts)).read(0.0)
    assert signal is not None
    assert list(signal.values) == pytest.approx([521.63], abs=0.01)


@pytest.mark.parametrize("key_file", [None, "none", "empty"])
def test_a_missing_key_is_reported(tmp_path: Path, key_file: str | None) -> None:
    (tmp_path / "empty").touch()
    settings = SignalSettings(
        kind="carbon",
        provider="electricity-maps",
        zone="DE",
        key_file=None if key_file is None else tmp_path / key_file,
    )
    with pytest.raises(SignalUnusableError, match=r"^signals\.grid: .*(key_file|none|empty)"):
        open_source("grid", settings, {})


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "expected one of csv and provider"),
        ({"csv": "x", "provider": "uk-carbon-intensity", "column": "g"}, "expected one of csv and provider"),
        ({"csv": "x"}, "expected csv and column together"),
        ({"provider": "electricity-maps"}, "expected a zone"),
        ({"provider": "uk-carbon-intensity", "zone": "GB"}, "expected a zone"),
        ({"provider": "electricity-maps", "zone": "../x"}, "zone"),
        ({"provider": "electricity-maps", "zone": "DE", "region": 1}, "expected a region"),
        ({"kind": "price", "provider": "uk-carbon-intensity"}, "expected kind carbon"),
        ({"provider": "uk-carbon-intensity", "key_file": "x"}, "expected a key_file"),
        ({"csv": "x", "column": "g", "url": "https://x"}, "expected a url with a provider"),
        ({"provider": "uk-carbon-intensity", "url": "http://example.org"}, "http:// on loopback only"),
        ({"provider": "uk-carbon-intensity", "url": "https://a:b@example.org"}, "expected https://HOST"),
        ({"provider": "uk-carbon-intensity", "url": "https://[x"}, "expected https://HOST"),
        ({"csv": "x", "column": "g", "stale_s": -1}, "stale_s"),
        ({"csv": "x", "column": "g", "unit": "t/MWh"}, "unit"),
        ({"csv": "x", "column": "g", "unit": "per MWh"}, "expected a unit of kind carbon, one of g/kWh, "),
        ({"provider": "uk-carbon-intensity", "unit": "g/kWh"}, "expected a unit with csv only"),
        ({"csv": "x", "column": "g", "colum": "g"}, "colum"),
    ],
)
def test_invalid_settings_are_refused(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        SignalSettings(**{"kind": "carbon", **parts})


@pytest.mark.parametrize(
    "url", ["https://proxy.example.org:8443/maps", "http://127.0.0.1:80", "http://[::1]:80"]
)
def test_a_provider_may_be_elsewhere(url: str) -> None:
    assert SignalSettings(kind="carbon", provider="uk-carbon-intensity", url=url).url == url


def test_a_feed_has_at_most_one_signal_of_each_kind() -> None:
    one: dict[str, Any] = {"kind": "carbon", "csv": "x", "column": "g"}
    for signals, text in [
        ({"a": {**one, "feeds": ["hall"]}}, "a: feeds: expected default"),
        ({"a": one, "b": one}, "b: expected one carbon signal for all feeds without their own"),
        (
            {"a": {**one, "feeds": ["default"]}, "b": {**one, "feeds": ["default"]}},
            "b: expected one carbon signal for feed default, found a, too",
        ),
    ]:
        with pytest.raises(ValidationError, match=text):
            CoordinatorSettings(signals=signals)  # type: ignore[arg-type]
    fine = {"a": one, "b": {**one, "feeds": ["default"]}, "c": {**one, "kind": "price"}}
    assert set(CoordinatorSettings(signals=fine).signals) == {"a", "b", "c"}  # type: ignore[arg-type]
