"""Great Britain's Carbon Intensity API, in half-hours: https://carbon-intensity.github.io/api-definitions.

    GET /intensity/{from}/{to}                                {"data": [{"from", "to", "intensity": {…}}]}
    GET /regional/intensity/{from}/{to}/regionid/{regionid}   {"data": {"regionid", "data": [the same]}}

An intensity has a `forecast` and, for past half-hours of the whole country, an `actual`, in gCO2 per kWh.
Times are UTC, to the minute; a range has at most 14 days. No key is needed.
"""

from typing import Any

from perseus.service.domain.signals import SignalKind
from perseus.service.fleet.signals.series import Signal
from perseus.service.signals.json_client import JsonClient
from perseus.service.signals.json_series import member, number, rows, signal_of, text_of_time, time_s
from perseus.service.signals.source import SourceError

URL = "https://api.carbonintensity.org.uk"
NAME = "Carbon Intensity API"
PERIOD_S = 900.0
_DAY_S = 86_400.0
_BACK_S, _AHEAD_S = 11 * _DAY_S, 2 * _DAY_S


class UkCarbonIntensity:
    """A source that reads the Carbon Intensity API. Without `has_forecast`, it drops future values.

    `region`: the API's number of a region, 1 to 17; None for the whole of Great Britain.
    """

    period_s = PERIOD_S

    def __init__(self, client: JsonClient, region: int | None, stale_s: float, *, has_forecast: bool) -> None:
        self._client = client
        self._region = region
        self._stale_s = stale_s
        self._has_forecast = has_forecast

    async def read(self, now_s: float) -> Signal:
        """Fetch the signal from 11 days ago to 2 days ahead.

        Raises:
            SourceError: the service can't be reached, or its answer is unusable.
        """
        begin, end = text_of_time(now_s - _BACK_S), text_of_time(now_s + _AHEAD_S)
        if self._region is None:
            found = rows(NAME, await self._client.get(f"/intensity/{begin}/{end}"), "data")
        else:
            path = f"/regional/intensity/{begin}/{end}/regionid/{self._region}"
            found = self._regional(await self._client.get(path))
        values = [(time_s(NAME, member(NAME, row, "from")), _intensity(row)) for row in found]
        if not self._has_forecast:
            values = [(at_s, value) for at_s, value in values if at_s <= now_s]
        return signal_of(NAME, SignalKind.CARBON, values, self._stale_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _regional(self, response: Any) -> Any:
        region = member(NAME, response, "data", "regionid")
        if region != self._region:
            raise SourceError(f"{NAME}: expected regionid {self._region}, found {region!r:.60}")
        return rows(NAME, response, "data", "data")


def _intensity(row: Any) -> float | None:
    """Return the measured intensity, or the forecast until it is known."""
    intensity = member(NAME, row, "intensity")
    actual = number(NAME, intensity.get("actual") if isinstance(intensity, dict) else None)
    return number(NAME, member(NAME, row, "intensity", "forecast")) if actual is None else actual
