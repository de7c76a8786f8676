"""Both providers against answers in their documented forms, and against malformed ones."""

from datetime import UTC, datetime
from typing import Any

import pytest

from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.history import SignalHistory
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
UK = {
    f"/intensity{UK_PATH}": {"data": UK_ROWS},
    f"/regional/intensity{UK_PATH}/regionid/13": {
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


def maps(
    server: SignalServer, kind: SignalKind = SignalKind.CARBON, *, has_forecast: bool = True
) -> ElectricityMaps:
    client = JsonClient(server.url, {"auth-token": KEY}, timeout_s=5.0)
    return ElectricityMaps(client, kind, "DE", STALE_S, has_forecast=has_forecast)


def uk(server: SignalServer, region: int | None = None, *, has_forecast: bool = True) -> UkCarbonIntensity:
    return UkCarbonIntensity(
        JsonClient(server.url, timeout_s=5.0), region, STALE_S, has_forecast=has_forecast
    )


async def test_electricity_maps_returns_the_last_day_and_the_next_ones() -> None:
    async with serving(MAPS) as server:
        source = maps(server)
        signal = await source.read(NOON_S)
        await source.close()
    hours = [int((time_s - NOON_S) // HOUR_S) + 12 for time_s in signal.times_s]
    assert hours == list(range(9, 20))
    assert list(signal.values) == [300.0 + hour if hour <= 12 else 400.0 + hour for hour in hours]
    assert (signal.kind, signal.valid_s, signal.stale_s) == (SignalKind.CARBON, HOUR_S, STALE_S)
    assert ("/v3/carbon-intensity/forecast", {"zone": "DE", "horizonHours": "72"}) in server.asked
    assert all(headers["auth-token"] == KEY for headers in server.headers)


async def test_its_prices_are_per_kilowatt_hour_and_may_be_negative() -> None:
    async with serving(MAPS) as server:
        source = maps(server, SignalKind.PRICE)
        signal = await source.read(NOON_S)
        await source.close()
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
    async with serving({path: {"zone": "DE", rows_name: quarters}}) as server:
        source = maps(server, kind, has_forecast=kind is SignalKind.PRICE)
        signal = await source.read(NOON_S + HOUR_S)
        await source.close()
    assert signal.valid_s == HOUR_S / 4
    assert signal.value_at(NOON_S + HOUR_S / 4) == 60.0 / factor
    history = SignalHistory()
    history.take(signal, NOON_S + HOUR_S)
    assert history.mean_in_hour(int(NOON_S // HOUR_S)) == pytest.approx(100.0 / factor)
    assert signal.hourly(NOON_S + HOUR_S)[1].tolist() == pytest.approx([100.0 / factor])


async def test_without_forecasts_only_past_values_are_returned() -> None:
    async with serving(MAPS | UK) as server:
        sources = maps(server, has_forecast=False), uk(server, has_forecast=False)
        ends_s = [(await source.read(NOON_S)).times_s[-1] for source in sources]
        for source in sources:
            await source.close()
    assert ends_s == [NOON_S, NOON_S]
    assert not any("forecast" in path for path, _ in server.asked)


@pytest.mark.parametrize(("region", "first"), [(None, 120.0), (13, 220.0)])
async def test_the_uks_half_hours_are_measured_and_then_forecast(region: int | None, first: float) -> None:
    async with serving(UK) as server:
        source = uk(server, region)
        signal = await source.read(NOON_S)
        await source.close()
    assert signal.valid_s == HOUR_S / 2
    assert signal.values[0] == first
    assert signal.value_at(NOON_S) == 224.0
    assert signal.times_s[-1] == NOON_S + 2.5 * HOUR_S


BAD_MAPS: list[tuple[Any, str]] = [
    ({"zone": "FR", "history": []}, "expected zone DE, found 'FR'"),
    ({"history": []}, "expected zone, found none"),
    ({"zone": "DE"}, "expected history, found none"),
    ({"zone": "DE", "history": {}}, "history: expected a list, found dict"),
    ({"zone": "DE", "history": []}, "expected at least one value, found none"),
    ({"zone": "DE", "history": [maps_row(9, None)]}, "expected at least one value, found none"),
    (
        {"zone": "DE", "history": [{"datetime": "2026-03-01T09:00:00Z"}]},
        "expected carbonIntensity, found none",
    ),
    (
        {"zone": "DE", "history": [{"datetime": 5, "carbonIntensity": 1}]},
        "expected a time in ISO 8601, found 5",
    ),
    (
        {"zone": "DE", "history": [{"datetime": "2026-03-01T09:00:00Z", "carbonIntensity": "1"}]},
        "expected a number or null, found '1'",
    ),
    ({"zone": "DE", "history": [maps_row(9, -1.0)]}, r"values\[0\]: expected 0 to 2000, found -1.0"),
    ({"zone": "DE", "history": [None] * 10_001}, "history: expected at most 10000 rows, found 10001"),
    ([], "expected zone, found none"),
    ("text", "expected zone, found none"),
]


@pytest.mark.parametrize(("answer", "text"), BAD_MAPS)
async def test_a_malformed_answer_is_one_clear_error(answer: Any, text: str) -> None:
    async with serving({"/v3/carbon-intensity/history": answer}) as server:
        source = maps(server, has_forecast=False)
        with pytest.raises(SourceError, match=f"^Electricity Maps: .*{text}$"):
            await source.read(NOON_S)
        await source.close()


@pytest.mark.parametrize("unit", ["EUR/kWh", None, 5])
async def test_prices_in_another_unit_are_refused(unit: Any) -> None:
    row = {"datetime": "2026-03-01T09:00:00Z", "value": 1.0, "unit": unit}
    async with serving({"/v4/price-day-ahead/combined": {"zone": "DE", "data": [row]}}) as server:
        source = maps(server, SignalKind.PRICE)
        with pytest.raises(SourceError, match="expected a currency per MWh"):
            await source.read(NOON_S)
        await source.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"data": [{"from": "2026-03-01T09:00Z"}]}, "expected intensity, found none"),
        (
            {"data": [{"from": "2026-03-01T09:00Z", "intensity": {}}]},
            "expected intensity.forecast, found none",
        ),
        ({"data": [{"from": "x", "intensity": {"forecast": 1}}]}, "expected a time in ISO 8601, found 'x'"),
        ({"error": {"code": "400 Bad Request", "message": "…"}}, "expected data, found none"),
    ],
)
async def test_malformed_answers_of_the_uk_are_refused(answer: Any, text: str) -> None:
    async with serving({f"/intensity{UK_PATH}": answer}) as server:
        source = uk(server)
        with pytest.raises(SourceError, match=f"^Carbon Intensity API: {text}$"):
            await source.read(NOON_S)
        await source.close()


async def test_a_region_other_than_requested_is_refused() -> None:
    answer = {"data": {"regionid": 12, "data": UK_ROWS}}
    async with serving({f"/regional/intensity{UK_PATH}/regionid/13": answer}) as server:
        source = uk(server, 13)
        with pytest.raises(SourceError, match="expected regionid 13, found 12"):
            await source.read(NOON_S)
        await source.close()
