"""The gateway's settings: flags, environment (PERSEUS_GRID_…) and TOML file; see `perseus.configuration`."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, StringConstraints
from pydantic_settings import BaseSettings, SettingsConfigDict

from perseus.logs import LogFormat, LogLevel
from perseus.tls.address import host_and_port
from perseus.tls.fields import contradicts, goes_with, keeps_plaintext_here, needs
from perseus.tls.files import TlsFiles


def default_state() -> Path:
    """Return root's /var/lib/perseus/dsx-flex.db, or a file under $XDG_STATE_HOME (~/.local/state)."""
    if os.geteuid() == 0:
        return Path("/var/lib/perseus/dsx-flex.db")
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "perseus" / "dsx-flex.db"


def _host_and_port(address: str) -> str:
    """Refuse any address to which the MQTT library can't connect."""
    if not re.fullmatch(r"[^/]+", address) or host_and_port(address) is None:
        raise ValueError("expected HOST:PORT with a port from 1 to 65535")
    return address


class DsxFlexSettings(BaseSettings):
    """Settings of a DSX Flex gateway."""

    model_config = SettingsConfigDict(env_prefix="PERSEUS_GRID_", extra="forbid", frozen=True)

    identifier: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")] = Field(
        description="This agent's name in the contract: its topics are grid/v1/dsx-flex-agent/IDENTIFIER/…"
    )
    tls_ca: Path | None = Field(
        None, description="PEM file with the CAs that may sign the coordinator's certificate; makes it TLS."
    )
    tls_certificate: Annotated[Path | None, needs("tls_ca")] = Field(
        None, description="PEM file with the gateway's certificate, for mutual TLS with the coordinator."
    )
    tls_key: Annotated[Path | None, goes_with("tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    insecure: Annotated[bool, contradicts("tls_ca")] = Field(
        False, description="Speak plaintext even to a coordinator and a broker on other machines."
    )
    token: SecretStr | None = Field(
        None, description="The gateway's token; only for the environment. A file is better."
    )
    token_file: Path | None = Field(
        None,
        description="File with a token of scope grid, reloaded when it changes; by default the operator's "
        "token written by this user's coordinator on this machine.",
    )
    coordinator: Annotated[str, Field(min_length=1), keeps_plaintext_here("tls_ca", is_list=True)] = Field(
        "127.0.0.1:50051", description="Coordinator's address, host:port; of a fleet, several with commas."
    )
    broker_tls_ca: Path | None = Field(
        None, description="PEM file with the CAs that may sign the broker's certificate; makes it TLS."
    )
    broker_tls_certificate: Annotated[Path | None, needs("broker_tls_ca")] = Field(
        None, description="PEM file with the gateway's certificate, for mutual TLS with the broker."
    )
    broker_tls_key: Annotated[Path | None, goes_with("broker_tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    broker_token_file: Path | None = Field(
        None,
        description="File with the OAuth2 token sent to the broker as password of user oauthtoken; "
        "read at every connection.",
    )
    broker: Annotated[str, AfterValidator(_host_and_port), keeps_plaintext_here("broker_tls_ca")] = Field(
        "127.0.0.1:1883", description="The MQTT broker's address, host:port."
    )
    keys: Path = Field(
        description="Folder with the public keys of accepted senders: a JWK set for each, "
        "isv/IDENTIFIER.json or infra/IDENTIFIER.json."
    )
    signing_key: Path = Field(description="File with the private JWK, with a kid, by which this agent signs.")
    state: Path = Field(
        default_factory=default_state,
        description="File with the accepted messages; it must outlive the gateway.",
    )
    heartbeat_s: float = Field(
        30.0, ge=1, le=3600, description="Seconds between power states if nothing changes."
    )
    log_level: LogLevel = Field("info", description="Lowest level of log lines.")
    log_format: LogFormat = Field("console", description="Format of log lines: console or json.")

    @property
    def tls_files(self) -> TlsFiles | None:
        """TLS files for the connection to the coordinator; None for plaintext."""
        if self.tls_ca is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def broker_tls_files(self) -> TlsFiles | None:
        """TLS files for the connection to the broker; None for plaintext."""
        if self.broker_tls_ca is None:
            return None
        return TlsFiles(self.broker_tls_certificate, self.broker_tls_key, self.broker_tls_ca)
