"""Creates the source of a signal from the operator's settings."""

import os
from collections.abc import Mapping

from perseus.service.domain.errors import SignalUnusableError
from perseus.service.domain.signals import SignalKind
from perseus.service.signal_settings import SignalSettings
from perseus.service.signals import electricity_maps, uk_carbon_intensity
from perseus.service.signals.csv_source import CsvSource
from perseus.service.signals.electricity_maps import ElectricityMaps
from perseus.service.signals.json_client import JsonClient
from perseus.service.signals.source import Source
from perseus.service.signals.uk_carbon_intensity import UkCarbonIntensity
from perseus.tls.tokens import TokenFileError, check_token, read_token

KEY_VARIABLE = "PERSEUS_ELECTRICITY_MAPS_KEY"


def open_source(name: str, settings: SignalSettings, environment: Mapping[str, str] = os.environ) -> Source:
    """Return the source, without reading from it yet.

    Raises:
        SignalUnusableError: its key is missing.
    """
    kind, stale_s = SignalKind(settings.kind), settings.stale_s
    has_forecast = settings.forecast == "source"
    if settings.csv is not None:
        return CsvSource(
            settings.csv, kind, settings.column, stale_s, unit=settings.unit, has_forecast=has_forecast
        )
    if settings.provider == "uk-carbon-intensity":
        client = JsonClient(settings.url or uk_carbon_intensity.URL, timeout_s=settings.timeout_s)
        return UkCarbonIntensity(client, settings.region, stale_s, has_forecast=has_forecast)
    headers = {electricity_maps.KEY_HEADER: _key(name, settings, environment)}
    client = JsonClient(settings.url or electricity_maps.URL, headers, settings.timeout_s)
    return ElectricityMaps(client, kind, settings.zone, stale_s, has_forecast=has_forecast)


def _key(name: str, settings: SignalSettings, environment: Mapping[str, str]) -> str:
    try:
        if settings.key_file is not None:
            return read_token(settings.key_file)
        return check_token(environment.get(KEY_VARIABLE, ""), f"key_file, or {KEY_VARIABLE}")
    except TokenFileError as error:
        raise SignalUnusableError(signal=name, cause=error) from None
