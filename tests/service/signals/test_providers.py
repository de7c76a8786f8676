"""Both providers against answers in their documented forms, and against malformed ones."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.history import SignalHistory
from perseus.service.fleet.signals.series import Signal
from perseus.service.signals.electricity_maps import ElectricityMaps
from perseus.service.signals.json_client import JsonClient
from perseus.service.signals.source import SourceError
from perseus.service.signals.uk_carbon_intensity import UkCarbonIntensity
from tests.service.signals.signal_server import SignalServer, serving

NOON_S = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
KEY = "secret-key"
STALE_S = 3 * HOUR_S


def maps_row(hour: int, intensity: float | None) -> dict[str, Any]:
    return {
        "zone": "DE",
        "carbonIntensity": intensity,
        "datetime": f"2026-03-01T{hour:02}:00:00.000Z",
        "updatedAt": "2026-03-01T11:40:31.772Z",
        "createdAt": "2026-02-26T06:20:31.772Z",
        "emissionFactorType": "lifecycle",
        "isEstimated": hour > 10,
        "estimationMethod": "TIME_SLICER_AVERAGE" if hour > 10 else None,
    }


MAPS = {
    "/v3/carbon-intensity/history": {
        "zone": "DE",
        "history": [maps_row(hour, 300.0 + hour) for hour in range(9, 13)],
    },
    "/v3/carbon-intensity/forecast": {
        "zone": "DE",
        "forecast": [
            {"carbonIntensity": 400 + hour, "datetime": f"2026-03-01T{hour:02}:00:00.000Z"}
            for hour in range(12, 20)
        ],
        "updatedAt": "2026-03-01T11:32:11.961Z",
    },
    "/v4/price-day-ahead/combined": {
        "zone": "DE",
        "data": [
            {
                "datetime": f"2026-03-01T{hour:02}:00:00.000Z",
                "value": 10.0 * hour - 115,
                "unit": "EUR/MWh",
                "source": "nordpool.com",
            }
            for hour in range(11, 15)
        ],
        "temporalGranularity": "hourly",
    },
}


def uk_row(half_hour: int, forecast: float, actual: float | None) -> dict[str, Any]:
    begin, end = (f"2026-03-01T{n // 2:02}:{30 * (n % 2):02}Z" for n in (half_hour, half_hour + 1))
    return {
        "from": begin,
        "to": end,
        "intensity": {"forecast": forecast, "actual": actual, "index": "moderate"},
    }


UK_ROWS = [uk_row(n, 200.0 + n, 100.0 + n if n < 24 else None) for n in range(20, 30)]
UK_PATH = "/2026-02-18T12:00Z/2026-03-03T12:00Z"
INTENSITY, REGION_13 = f"/intensity{UK_PATH}", f"/regional/intensity{UK_PATH}/regionid/13"
UK = {
    INTENSITY: {"data": UK_ROWS},
    REGION_13: {
        "data": {
            "regionid": 13,
            "dnoregion": "UKPN London",
            "shortname": "London",
            "data": [
                {
                    "from": row["from"],
                    "to": row["to"],
                    "intensity": {"forecast": row["intensity"]["forecast"], "index": "moderate"},
                    "generationmix": [{"fuel": "gas", "perc": 43.6}],
                }
                for row in UK_ROWS
            ],
        }
    },
}


Source = ElectricityMaps | UkCarbonIntensity
Open = Callable[[JsonClient], Source]


def maps(kind: SignalKind = SignalKind.CARBON, *, has_forecast: bool = True) -> Open:
    return lambda client: ElectricityMaps(client, kind, "DE", STALE_S, has_forecast=has_forecast)


def uk(region: int | None = None, *, has_forecast: bool = True) -> Open:
    return lambda client: UkCarbonIntensity(client, region, STALE_S, has_forecast=has_forecast)


async def read(
    answers: Mapping[str, Any], opened: Open, now_s: float = NOON_S
) -> tuple[Signal, SignalServer]:
    """Read a signal from a server with these answers."""
    async with serving(answers) as server:
        source = opened(JsonClient(server.url, {"auth-token": KEY}, timeout_s=5.0))
        try:
            return await source.read(now_s), server
        finally:
            await source.close()


async def test_electricity_maps_returns_the_last_day_and_the_next_ones() -> None:
    signal, server = await read(MAPS, maps())
    hours = [int((time_s - NOON_S) // HOUR_S) + 12 for time_s in signal.times_s]
    assert hours == list(range(9, 20))
    assert list(signal.values) == [300.0 + hour if hour <= 12 else 400.0 + hour for hour in hours]
    assert (signal.kind, signal.valid_s, signal.stale_s) == (SignalKind.CARBON, HOUR_S, STALE_S)
    assert ("/v3/carbon-intensity/forecast", {"zone": "DE", "horizonHours": "72"}) in server.asked
    assert all(headers["auth-token"] == KEY for headers in server.headers)


async def test_its_prices_are_per_kilowatt_hour_and_may_be_negative() -> None:
    signal, _ = await read(MAPS, maps(SignalKind.PRICE))
    assert list(signal.values) == pytest.approx([-0.005, 0.005, 0.015, 0.025])


@pytest.mark.parametrize(
    ("kind", "path", "name", "rows_name", "factor"),
    [
        (SignalKind.CARBON, "/v3/carbon-intensity/history", "carbonIntensity", "history", 1.0),
        (SignalKind.PRICE, "/v4/price-day-ahead/combined", "value", "data", 1000.0),
    ],
)
async def test_quarter_hours_count_each_in_the_mean_of_their_hour(
    kind: SignalKind, path: str, name: str, rows_name: str, factor: float
) -> None:
    values = {"11:45": 0.0, "12:00": 20.0, "12:15": 60.0, "12:30": 120.0, "12:45": 200.0}
    quarters = [
        {"datetime": f"2026-03-01T{at}:00.000Z", name: value, "unit": "EUR/MWh"}
        for at, value in values.items()
    ]
    source = maps(kind, has_forecast=kind is SignalKind.PRICE)
    signal, _ = await read({path: {"zone": "DE", rows_name: quarters}}, source, NOON_S + HOUR_S)
    assert signal.valid_s == HOUR_S / 4
    assert signal.value_at(NOON_S + HOUR_S / 4) == 60.0 / factor
    history = SignalHistory()
    history.take(signal, NOON_S + HOUR_S)
    assert history.mean_in_hour(int(NOON_S // HOUR_S)) == pytest.approx(100.0 / factor)
    assert signal.hourly(NOON_S + HOUR_S)[1].tolist() == pytest.approx([100.0 / factor])


@pytest.mark.parametrize("source", [maps(has_forecast=False), uk(has_forecast=False)], ids=["maps", "uk"])
async def test_without_forecasts_only_past_values_are_returned(source: Open) -> None:
    signal, server = await read(MAPS | UK, source)
    assert signal.times_s[-1] == NOON_S
    assert not any("forecast" in path for path, _ in server.asked)


@pytest.mark.parametrize(("region", "first"), [(None, 120.0), (13, 220.0)])
async def test_the_uks_half_hours_are_measured_and_then_forecast(region: int | None, first: float) -> None:
    signal, _ = await read(UK, uk(region))
    assert (signal.valid_s, signal.values[0], signal.value_at(NOON_S)) == (HOUR_S / 2, first, 224.0)
    assert signal.times_s[-1] == NOON_S + 2.5 * HOUR_S


PRICES, HISTORY = "/v4/price-day-ahead/combined", "/v3/carbon-intensity/history"


def history(*rows: Any) -> dict[str, Any]:
    return {"zone": "DE", "history": list(rows)}


def at_nine(name: str, value: Any, **others: Any) -> dict[str, Any]:
    return {"datetime": "2026-03-01T09:00:00Z", name: value, **others}


def half_hour(**parts: Any) -> dict[str, Any]:
    return {"data": [{"from": "2026-03-01T09:00Z", **parts}]}


def priced(unit: Any) -> dict[str, Any]:
    return {"zone": "DE", "data": [at_nine("value", 1.0, unit=unit)]}


PAST, PRICE = maps(has_forecast=False), maps(SignalKind.PRICE)
A_TIME = "expected a time in ISO 8601, found"
ONE_VALUE = "expected at least one value, found none"
A_UNIT = "expected a currency per MWh, found .*"


@pytest.mark.parametrize(
    ("opened", "path", "answer", "text"),
    [
        (PAST, HISTORY, {"zone": "FR", "history": []}, "expected zone DE, found 'FR'"),
        (PAST, HISTORY, {"history": []}, "expected zone, found none"),
        (PAST, HISTORY, {"zone": "DE"}, "expected history, found none"),
        (PAST, HISTORY, {"zone": "DE", "history": {}}, "history: expected a list, found dict"),
        (PAST, HISTORY, history(), ONE_VALUE),
        (PAST, HISTORY, history(maps_row(9, None)), ONE_VALUE),
        (PAST, HISTORY, history(at_nine("x", 1.0)), "expected carbonIntensity, found none"),
        (PAST, HISTORY, history({"datetime": 5, "carbonIntensity": 1}), f"{A_TIME} 5"),
        (PAST, HISTORY, history(at_nine("carbonIntensity", "1")), "expected a number or null, found '1'"),
        (PAST, HISTORY, history(maps_row(9, -1.0)), r"values\[0\]: expected 0 to 2000, found -1.0"),
        (PAST, HISTORY, history(*[None] * 10_001), "history: expected at most 10000 rows, found 10001"),
        (PAST, HISTORY, [], "expected zone, found none"),
        (PAST, HISTORY, "text", "expected zone, found none"),
        (PRICE, PRICES, priced("EUR/kWh"), A_UNIT),
        (PRICE, PRICES, priced(None), A_UNIT),
        (PRICE, PRICES, priced(5), A_UNIT),
        (uk(), INTENSITY, half_hour(), "expected intensity, found none"),
        (uk(), INTENSITY, half_hour(intensity={}), "expected intensity.forecast, found none"),
        (uk(), INTENSITY, {"data": [{"from": "x", "intensity": {"forecast": 1}}]}, f"{A_TIME} 'x'"),
        (uk(), INTENSITY, {"error": {"code": "400 Bad Request"}}, "expected data, found none"),
        (uk(13), REGION_13, {"data": {"regionid": 12, "data": UK_ROWS}}, "expected regionid 13, found 12"),
    ],
)
async def test_a_malformed_answer_is_one_clear_error(opened: Open, path: str, answer: Any, text: str) -> None:
    name = "Electricity Maps: .*" if path in (HISTORY, PRICES) else "Carbon Intensity API: "
    with pytest.raises(SourceError, match=f"^{name}{text}$"):
        await read({path: answer}, opened)
