"""Electricity Maps: carbon intensity and day-ahead price.

    GET /v3/carbon-intensity/history?zone=DE   {"zone", "history": [{"carbonIntensity", "datetime", …}]}
    GET /v3/carbon-intensity/forecast?zone=DE&horizonHours=72
                                               {"zone", "forecast": [{"carbonIntensity", "datetime"}]}
    GET /v4/price-day-ahead/combined?zone=DE   {"zone", "data": [{"datetime", "value", "unit", "source"}]}

Reference: https://portal.electricitymaps.com/developer-hub/api/reference. The history covers the last 24
hours, in gCO2eq per kWh; the prices, per MWh, are those that the exchange has published, followed by forecast
ones. The key goes in the header `auth-token`.
"""

from collections.abc import Iterable
from typing import Any

from perseus.service.domain.signals import SignalKind
from perseus.service.fleet.signals.series import Signal
from perseus.service.signals.json_client import JsonClient
from perseus.service.signals.json_series import member, number, rows, signal_of, time_s
from perseus.service.signals.source import SourceError

URL = "https://api.electricitymaps.com"
NAME = "Electricity Maps"
KEY_HEADER = "auth-token"
PERIOD_S = 900.0
_HORIZON_H = 72
_KWH_PER_MWH = 1000.0


class ElectricityMaps:
    """A source that reads a zone from Electricity Maps. Without `has_forecast`, it drops future values."""

    period_s = PERIOD_S

    def __init__(
        self, client: JsonClient, kind: SignalKind, zone: str, stale_s: float, *, has_forecast: bool
    ) -> None:
        self._client = client
        self._kind = kind
        self._zone = zone
        self._stale_s = stale_s
        self._has_forecast = has_forecast

    async def read(self, now_s: float) -> Signal:
        """Fetch the signal's history and, if wanted, its forecast.

        Raises:
            SourceError: the service can't be reached, or its answer is unusable.
        """
        found = await (self._carbon() if self._kind is SignalKind.CARBON else self._prices())
        if not self._has_forecast:
            found = [(at_s, value) for at_s, value in found if at_s <= now_s]
        return signal_of(NAME, self._kind, found, self._stale_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _carbon(self) -> list[tuple[float, float | None]]:
        query = {"zone": self._zone}
        found: list[tuple[float, float | None]] = []
        if self._has_forecast:
            response = await self._client.get(
                "/v3/carbon-intensity/forecast", {**query, "horizonHours": str(_HORIZON_H)}
            )
            self._check_zone(response)
            found += _rows(rows(NAME, response, "forecast"), "carbonIntensity")
        response = await self._client.get("/v3/carbon-intensity/history", query)
        self._check_zone(response)
        # Later rows win, so history replaces forecasts of the same times.
        return found + _rows(rows(NAME, response, "history"), "carbonIntensity")

    async def _prices(self) -> list[tuple[float, float | None]]:
        response = await self._client.get("/v4/price-day-ahead/combined", {"zone": self._zone})
        self._check_zone(response)
        data = rows(NAME, response, "data")
        common = response.get("unit")
        for row in data:
            unit = row.get("unit", common) if isinstance(row, dict) else common
            if not isinstance(unit, str) or not unit.endswith("/MWh"):
                raise SourceError(f"{NAME}: data.unit: expected a currency per MWh, found {unit!r:.60}")
        found = _rows(data, "value")
        return [(at_s, None if value is None else value / _KWH_PER_MWH) for at_s, value in found]

    def _check_zone(self, response: Any) -> None:
        """Refuse another zone: for an unknown zone, the service answers with the caller's own."""
        zone = member(NAME, response, "zone")
        if zone != self._zone:
            raise SourceError(f"{NAME}: expected zone {self._zone}, found {zone!r:.60}")


def _rows(found: Iterable[Any], value: str) -> list[tuple[float, float | None]]:
    """Return times and values. Zones differ in their steps: hours, quarter-hours or five minutes."""
    return [
        (time_s(NAME, member(NAME, row, "datetime")), number(NAME, member(NAME, row, value))) for row in found
    ]
