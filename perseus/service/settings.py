"""The coordinator's settings, from flags, environment (`PERSEUS_COORDINATOR_…`) and a TOML file."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from perseus.logs import LogFormat, LogLevel
from perseus.service.domain.ledger import MAX_INTENSITY_G_PER_KWH
from perseus.service.domain.limits import Limits
from perseus.service.domain.retention import Retention
from perseus.service.job.rules import Rules
from perseus.service.signal_settings import SignalSettings
from perseus.tls.address import host_and_port
from perseus.tls.fields import contradicts, goes_with, keeps_plaintext_here, needs
from perseus.tls.rules import check_dask, check_needs
from perseus.tls.tokens import default_token_file

if TYPE_CHECKING:
    from perseus.service.domain.power import Feed

_by_tls = keeps_plaintext_here("tls_certificate", wanted="tls_certificate and tls_key", min_port=0)


def _is_host_and_port(address: str | None) -> str | None:
    if address is not None and host_and_port(address) is None:
        raise ValueError("expected HOST:PORT, with a port from 0 to 65535")
    return address


def _is_dask(address: str | None, info: ValidationInfo) -> str | None:
    if address is None:
        return None
    return check_dask(address, insecure=bool(info.data.get("dask_insecure")), wanted="dask_insecure")


def _is_served(slots: int, info: ValidationInfo) -> int:
    if slots > 1 and "://" not in str(info.data.get("database", "")):
        raise ValueError("expected 1, as SQLite serves one coordinator, or a database postgresql://…")
    return slots


class FeedSettings(BaseModel):
    """A feed, in the TOML file: `[feeds.NAME]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: tuple[str, ...] = Field(
        default=(), max_length=1024, description="Patterns of its hosts' names, with '*' and '?'."
    )
    limit_w: float | None = Field(default=None, ge=1, le=1e12, description="The limit that always holds.")
    default_w: float | None = Field(
        default=None, ge=0, le=1e12, description="Its limit while no budget is in force."
    )
    reference_w: float | None = Field(
        default=None, ge=1, le=1e12, description="Power that percentages refer to; by default limit_w."
    )
    ramp_down_w_per_s: float = Field(
        default=math.inf, ge=1e-3, description="Highest ramp at which the power cap falls."
    )
    ramp_up_w_per_s: float = Field(
        default=math.inf, ge=1e-3, description="Highest ramp at which the power cap rises."
    )

    fail_safe: Literal["stock", "last plan"] = Field(
        default="stock", description="State of its GPUs after they lose the coordinator."
    )

    def feed(self, name: str) -> "Feed":
        """Return the feed.

        Raises:
            InvalidFieldError: its name is invalid, or a figure is out of range.
        """
        from perseus.service.domain.power import Feed

        return Feed(
            name,
            reference_w=self.limit_w if self.reference_w is None else self.reference_w,
            **self.model_dump(exclude={"hosts", "reference_w", "fail_safe"}),
        )


class CoordinatorSettings(Rules, Limits, Retention, BaseSettings):
    """Settings of one coordinator."""

    model_config = SettingsConfigDict(env_prefix="PERSEUS_COORDINATOR_", extra="forbid", frozen=True)

    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file with the coordinator's certificate and its chain up to the CA.",
    )
    tls_key: Annotated[Path | None, goes_with("tls_certificate")] = Field(
        default=None, validate_default=True, description="PEM file with the certificate's private key."
    )
    tls_client_ca: Annotated[Path | None, needs("tls_certificate")] = Field(
        default=None,
        description="PEM file with CAs; every client must present a certificate of one of them (mutual TLS).",
    )
    insecure: Annotated[bool, contradicts("tls_certificate")] = Field(
        default=False,
        description="Authenticate nobody, and listen in plaintext even where other machines can connect.",
    )
    listen: Annotated[str, _by_tls] = Field(
        default="127.0.0.1:50051", description="Address and port, or unix:PATH; port 0 takes a free one."
    )
    http: Annotated[str | None, AfterValidator(_is_host_and_port), _by_tls] = Field(
        default=None,
        description="Address and port of the live page and /metrics: HTTP, or HTTPS with tls_certificate.",
    )
    http_hosts: str = Field(
        default="",
        description="Host names for browsers in plaintext, in addition to localhost; separated by commas.",
    )
    metrics_ranks: bool = Field(
        default=False, description="Include every rank in the metrics: five series for each."
    )
    operator_token_file: Path = Field(
        default_factory=default_token_file,
        description="File with an operator's token, created if absent; commands of the same user find it.",
    )
    certificate_scopes: dict[str, str] = Field(
        default={},
        description="Scopes of clients with these certificate identities and no token.",
    )
    database: Path | str = Field(
        default=Path("perseus.db"),
        description="SQLite file, created if absent; or postgresql://USER@HOST/NAME.",
    )
    slots: Annotated[int, AfterValidator(_is_served)] = Field(
        default=1,
        ge=1,
        le=64,
        description="How many coordinators serve jobs at once, each its share of them, on one PostgreSQL "
        "database; fixed at its first start.",
    )
    advertise: Annotated[str | None, AfterValidator(_is_host_and_port)] = Field(
        default=None,
        description="HOST:PORT where agents and clients reach this coordinator, as others on the same "
        "PostgreSQL database tell them; by default listen, unless that is every address. "
        "Where http is every address, the page has its host.",
    )
    member_lease_s: float = Field(
        default=15.0,
        ge=1,
        le=600,
        description="Seconds after which another coordinator on the same PostgreSQL database takes over "
        "from one that is silent; below lease_s, so that ranks keep their plans.",
    )
    solver_processes: int = Field(default=1, ge=1, le=64, description="Jobs' problems solved concurrently.")
    solver_limit_s: float = Field(
        default=3600.0, gt=0, description="Seconds after which a job's problem counts as unsolvable."
    )
    solver_hull_tolerance_percent: float | None = Field(
        default=None,
        ge=0,
        le=99,
        description="Solve large problems sooner: plan on curves that are lower by at most this share of "
        "each computation's energy. By default 0 up to 4,096 computations, 0.2 beyond.",
    )
    request_processes: int = Field(
        default=1, ge=1, le=64, description="Clients' solve and plan requests processed concurrently."
    )
    request_limit_s: float = Field(
        default=120.0, gt=0, description="Seconds that a client's solve or plan request may take."
    )
    dask_insecure: bool = Field(
        default=False,
        description="Use a Dask cluster in plaintext: whoever can connect to it runs code there and here.",
    )
    dask: Annotated[str | None, AfterValidator(_is_dask)] = Field(
        default=None,
        description="Scheduler of a Dask cluster that solves instead of own processes: tls://HOST:PORT.",
    )
    price_per_kwh: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Price of a kWh in your currency, for the ledger; without it, costs are unknown.",
    )
    intensity_g_per_kwh: float | None = Field(
        default=None,
        ge=0,
        le=MAX_INTENSITY_G_PER_KWH,
        description="Grams of CO2 per kWh, for the ledger; without it, carbon is unknown.",
    )
    feeds: dict[str, FeedSettings] = Field(
        default={}, description="Power feeds by name, each with host patterns, limits and ramps."
    )
    signals: dict[str, SignalSettings] = Field(
        default={}, description="Signals of carbon intensity and price by name, each with its source."
    )
    shutdown_grace_s: float = Field(
        default=5.0, ge=0, le=600, description="Time for open calls to finish at shutdown, seconds."
    )
    late_limit_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600,
        description="Delay of the store or the event loop beyond which health is NOT_SERVING, seconds.",
    )
    log_level: LogLevel = Field(default="info", description="Lowest level of log lines.")
    log_format: LogFormat = Field(default="console", description="Format of log lines: console or json.")

    @field_validator("feeds")
    @classmethod
    def _are_feeds(cls, feeds: dict[str, FeedSettings]) -> dict[str, FeedSettings]:
        from perseus.service.domain.errors import InvalidFieldError

        for name, some in feeds.items():
            try:
                some.feed(name)
            except InvalidFieldError as error:
                raise ValueError(f"{name}: {error}") from None
        return feeds

    @field_validator("signals")
    @classmethod
    def _are_signals(
        cls, signals: dict[str, SignalSettings], info: ValidationInfo
    ) -> dict[str, SignalSettings]:
        from perseus.service.domain.power import DEFAULT_FEED

        known = {DEFAULT_FEED, *info.data.get("feeds", {})}
        taken: dict[tuple[str, str], str] = {}
        for name, some in signals.items():
            for feed in some.feeds or ("",):
                if feed and feed not in known:
                    raise ValueError(f"{name}: feeds: expected {', '.join(sorted(known))}")
                other = taken.setdefault((some.kind, feed), name)
                if other != name:
                    what = f"feed {feed}" if feed else "all feeds without their own"
                    raise ValueError(
                        f"{name}: expected one {some.kind} signal for {what}, found {other}, too"
                    )
        return signals

    @field_validator("certificate_scopes")
    @classmethod
    def _are_scopes(cls, scopes: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if scopes:
            check_needs(scopes, info.data.get("tls_client_ca"), "tls_client_ca")
        from perseus.service.domain.errors import InvalidFieldError
        from perseus.service.domain.principals import Grant

        for identity, text in scopes.items():
            try:
                Grant.parse(text)
            except InvalidFieldError as error:
                raise ValueError(f"{identity}: {error}") from None
        return scopes
