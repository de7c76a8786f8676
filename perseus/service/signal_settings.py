"""A signal, in the coordinator's TOML file: `[signals.NAME]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from perseus.tls.address import is_local

Unit = Literal["g/kWh", "kg/MWh", "lbs/MWh", "per kWh", "per MWh"]

UNITS: Mapping[str, Mapping[str, float]] = {
    "carbon": {"g/kWh": 1.0, "kg/MWh": 1.0, "lbs/MWh": 0.45359237},
    "price": {"per kWh": 1.0, "per MWh": 1e-3},
}
"""By kind, the units of a file's values, and what one is in g/kWh or per kWh."""


def check_unit(kind: str, unit: str | None) -> None:
    """Raise ValueError if values of this kind can't have the unit."""
    if unit is not None and unit not in UNITS[kind]:
        raise ValueError(f"expected a unit of kind {kind}, one of {', '.join(UNITS[kind])}, found {unit!r}")


class SignalSettings(BaseModel):
    """The source of one signal, and its feeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["carbon", "price"] = Field(
        description="Grams of CO2 per kWh (carbon), or its price in your currency."
    )
    feeds: tuple[str, ...] = Field(
        default=(), max_length=1024, description="Power feeds that use it; all others if empty."
    )
    csv: Path | None = Field(
        default=None, description="CSV file with a column timestamp; read again when it changes."
    )
    column: str = Field(default="", max_length=256, description="The file's column of values.")
    unit: Unit | None = Field(
        default=None,
        description="Unit of the file's values; g/kWh, or per kWh for prices, if not given.",
    )
    provider: Literal["electricity-maps", "uk-carbon-intensity"] | None = Field(
        default=None, description="A provider on the network."
    )
    zone: str = Field(
        default="",
        max_length=64,
        pattern="^[A-Za-z0-9-]*$",
        description="Electricity Maps' zone, such as DE.",
    )
    region: int | None = Field(
        default=None, ge=1, le=17, description="The UK's region; all of Great Britain if not given."
    )
    url: str | None = Field(default=None, description="The provider's URL, if it is not the usual one.")
    key_file: Path | None = Field(
        default=None, description="File with the provider's key; PERSEUS_ELECTRICITY_MAPS_KEY if not given."
    )
    forecast: Literal["source", "own"] = Field(
        default="source",
        description="Which forecast is used: the source's, or Perseus' own.",
    )
    stale_s: float = Field(
        default=10_800.0,
        ge=0,
        le=1e9,
        description="How long the last value counts after its period, seconds; then it is unknown.",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, le=600, description="Seconds that the provider may take to answer."
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 1
        except ValueError:
            raise ValueError("url: expected https://HOST") from None
        is_here = host is not None and is_local(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_here)
        if not host or not is_safe or parts.query or parts.fragment or parts.username:
            raise ValueError("url: expected https://HOST; http:// on loopback only")
        return url

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.csv is None) == (self.provider is None):
            raise ValueError("expected one of csv and provider")
        if (self.csv is None) != (not self.column):
            raise ValueError("expected csv and column together")
        if self.csv is None and self.unit is not None:
            raise ValueError("expected a unit with csv only")
        check_unit(self.kind, self.unit)
        if (self.provider == "electricity-maps") != bool(self.zone):
            raise ValueError("expected a zone with provider electricity-maps, and with nothing else")
        if self.region is not None and self.provider != "uk-carbon-intensity":
            raise ValueError("expected a region with provider uk-carbon-intensity only")
        if self.provider == "uk-carbon-intensity" and self.kind != "carbon":
            raise ValueError("expected kind carbon, the only one that uk-carbon-intensity has")
        if self.key_file is not None and self.provider != "electricity-maps":
            raise ValueError("expected a key_file with provider electricity-maps only")
        if self.url is not None and self.provider is None:
            raise ValueError("expected a url with a provider only")
        return self
