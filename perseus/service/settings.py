"""The coordinator's settings: flags, environment (`PERSEUS_COORDINATOR_…`) and a TOML file fill them."""

import math
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from perseus.logs import LogFormat, LogLevel
from perseus.tls.address import check_address, host_and_port
from perseus.tls.rules import check_insecure, check_needs, check_plaintext, check_together
from perseus.tls.tokens import default_token_file

# What a double, a column and a field of the wire hold alike.
_MOST = 2**53


class CoordinatorSettings(BaseSettings):
    """How one coordinator runs."""

    model_config = SettingsConfigDict(env_prefix="PERSEUS_COORDINATOR_", extra="forbid", frozen=True)

    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file with the coordinator's certificate, and those that lead to its CA.",
    )
    tls_key: Path | None = Field(
        default=None, validate_default=True, description="PEM file with the certificate's private key."
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file with CAs; every client must show a certificate of one of them (mutual TLS).",
    )
    insecure: bool = Field(
        default=False,
        description="Ask nobody who they are, and listen in plaintext even where other machines reach it.",
    )
    listen: str = Field(
        default="127.0.0.1:50051", description="Address and port, or unix:PATH; port 0 takes a free one."
    )
    http: str | None = Field(
        default=None,
        description="Address and port of the live page and /metrics: HTTP, or HTTPS with tls_certificate.",
    )
    http_hosts: str = Field(
        default="",
        description="Names by which browsers reach that in plaintext, beside localhost; with commas.",
    )
    metrics_ranks: bool = Field(
        default=False, description="Tell of every rank in the metrics, too: four series for each."
    )
    operator_token_file: Path = Field(
        default_factory=default_token_file,
        description="File with an operator's token, written if absent; commands of the same user find it.",
    )
    certificate_scopes: dict[str, str] = Field(
        default={},
        description="Scopes of those who show certificates with these identities, and no token.",
    )
    database: Path | str = Field(
        default=Path("perseus.db"),
        description="SQLite file, made if absent; or postgresql://USER@HOST/NAME.",
    )
    lease_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="How long plans outlive the last word between agent and coordinator, seconds.",
    )
    baseline_iterations: int = Field(
        default=5, ge=1, le=1000, description="Iterations of the stock baseline."
    )
    profile_iterations: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Iterations measured at a clock; noisier ones than others get more, clean ones fewer.",
    )
    profile_accuracy_percent: float = Field(
        default=0.3, gt=0, le=100, description="Profile until plans can change by no more energy than this."
    )
    profile_clocks: int = Field(default=12, ge=2, le=1000, description="Clocks measured per stage, at most.")
    profile_budget_iterations: int = Field(
        default=1000, ge=1, le=_MOST, description="Iterations that profiling may take."
    )
    profile_budget_s: float = Field(default=math.inf, gt=0, description="Seconds that profiling may take.")
    profile_budget_extra_s: float = Field(
        default=360.0, gt=0, description="Seconds that profiling may take beyond stock."
    )
    profile_budget_j: float = Field(
        default=math.inf, gt=0, description="Joules that profiling may take beyond stock."
    )
    guard_tolerance_percent: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Back to stock when iterations surely exceed the plan by this much.",
    )
    guard_iterations: int = Field(
        default=5, ge=1, le=1000, description="Iterations of which the median has to exceed it, at least."
    )
    solver_processes: int = Field(default=1, ge=1, le=64, description="Jobs' problems solved at a time.")
    solver_limit_s: float = Field(
        default=3600.0, gt=0, description="Seconds after which a job's problem counts as not to be solved."
    )
    request_processes: int = Field(
        default=1, ge=1, le=64, description="Solves and plans asked for by clients that are made at a time."
    )
    request_limit_s: float = Field(
        default=120.0, gt=0, description="Seconds that a client's solve or plan may take."
    )
    limit_streams: int = Field(
        default=16_384, ge=1, le=_MOST, description="Agents and watchers of one principal at once, at most."
    )
    limit_messages_per_s: float = Field(
        default=20_000.0, ge=1, description="Messages a second that all agents of one principal may send."
    )
    limit_stream_messages_per_s: float = Field(
        default=1_000.0, ge=1, description="Messages a second that one agent may send."
    )
    limit_jobs: int = Field(
        default=1_024,
        ge=1,
        le=_MOST,
        description="Jobs that one principal has registered and that live, at most.",
    )
    limit_ranks: int = Field(default=524_288, ge=1, le=_MOST, description="Ranks of these jobs, at most.")
    limit_computations: int = Field(
        default=1_048_576, ge=1, le=_MOST, description="Computations of the schedules of these jobs, at most."
    )
    limit_solves: int = Field(
        default=8, ge=1, le=_MOST, description="Solves and plans that one principal may wait for at once."
    )
    limit_solve_computations: int = Field(
        default=8_192, ge=1, le=65_536, description="Computations of a problem that a client has solved."
    )
    limit_batch_rows: int = Field(
        default=100_000, ge=1, le=1_000_000, description="Computations in one batch of telemetry, at most."
    )
    limit_message_bytes: int = Field(
        default=4_194_304, ge=65_536, le=2**30, description="Bytes of one message, unpacked, at most."
    )
    keep_events_days: float = Field(default=90.0, gt=0, le=36_500, description="Days that events are kept.")
    keep_event_count: int = Field(
        default=100_000, ge=1, le=_MOST, description="Events kept of each run, at most."
    )
    keep_finished_days: float = Field(
        default=90.0, gt=0, le=36_500, description="Days before only the report is left of a run that ended."
    )
    keep_finished_count: int = Field(
        default=1_000,
        ge=0,
        le=_MOST,
        description="Runs that ended and of which more is kept than the report, at most.",
    )
    keep_telemetry_days: float = Field(
        default=30.0, gt=0, le=36_500, description="Days that it is known what telemetry an agent has sent."
    )
    keep_telemetry_count: int = Field(
        default=100_000, ge=1, le=_MOST, description="Agents of which that is known, at most."
    )
    keep_ledger_days: float = Field(
        default=1_100.0,
        gt=0,
        le=36_500,
        description="Days that the ledger is kept, of ended and deleted jobs, too.",
    )
    price_per_kwh: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="What a kWh costs, in your currency, for the ledger; costs are not known if not given.",
    )
    intensity_g_per_kwh: float | None = Field(
        default=None,
        ge=0,
        le=1e5,
        description="Grams of CO2 that a kWh stands for, for the ledger; carbon is not known if not given.",
    )
    shutdown_grace_s: float = Field(
        default=5.0, ge=0, le=600, description="Time for open calls when stopping, seconds."
    )
    late_limit_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600,
        description="Health says NOT_SERVING while storing, or the event loop, is late by more, seconds.",
    )
    log_level: LogLevel = Field(default="info", description="Least severe log lines that are shown.")
    log_format: LogFormat = Field(default="console", description="How log lines look: console or json.")

    @field_validator("tls_key")
    @classmethod
    def _goes_with_its_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        check_together(key, info.data.get("tls_certificate"), "tls_certificate")
        return key

    @field_validator("tls_client_ca")
    @classmethod
    def _needs_a_certificate(cls, ca: Path | None, info: ValidationInfo) -> Path | None:
        check_needs(ca, info.data.get("tls_certificate"), "tls_certificate")
        return ca

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

    @field_validator("insecure")
    @classmethod
    def _is_no_contradiction(cls, insecure: bool, info: ValidationInfo) -> bool:
        check_insecure(insecure, info.data.get("tls_certificate"), "tls_certificate")
        return insecure

    @field_validator("http")
    @classmethod
    def _is_an_address(cls, http: str | None, info: ValidationInfo) -> str | None:
        if http is None:
            return None
        if host_and_port(http) is None:
            raise ValueError("expected HOST:PORT, with a port from 0 to 65535")
        return check_plaintext(
            check_address(http, least_port=0),
            has_tls=info.data.get("tls_certificate") is not None,
            insecure=bool(info.data.get("insecure")),
            wanted="tls_certificate and tls_key",
        )

    @field_validator("listen")
    @classmethod
    def _is_no_plaintext_to_others(cls, listen: str, info: ValidationInfo) -> str:
        return check_plaintext(
            check_address(listen, least_port=0),
            has_tls=info.data.get("tls_certificate") is not None,
            insecure=bool(info.data.get("insecure")),
            wanted="tls_certificate and tls_key",
        )
