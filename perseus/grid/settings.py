"""The door's settings: flags, environment (PERSEUS_GRID_…) and TOML file; see `perseus.configuration`."""

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
    """Root's is /var/lib/perseus/dsx-flex.db; others have theirs under $XDG_STATE_HOME (~/.local/state)."""
    if os.geteuid() == 0:
        return Path("/var/lib/perseus/dsx-flex.db")
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "perseus" / "dsx-flex.db"


def _host_and_port(address: str) -> str:
    """MQTT's library connects to no other."""
    if not re.fullmatch(r"[^/]+", address) or host_and_port(address) is None:
        raise ValueError("expected HOST:PORT with a port from 1 to 65535")
    return address


class DsxFlexSettings(BaseSettings):
    """What a door for DSX Flex must know before it starts."""

    model_config = SettingsConfigDict(env_prefix="PERSEUS_GRID_", extra="forbid", frozen=True)

    identifier: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")] = Field(
        description="This agent's name in the contract: its topics are grid/v1/dsx-flex-agent/IDENTIFIER/…"
    )
    tls_ca: Path | None = Field(
        None, description="PEM file with the CAs that may sign the coordinator's certificate; makes it TLS."
    )
    tls_certificate: Annotated[Path | None, needs("tls_ca")] = Field(
        None, description="PEM file with the door's own certificate, for mutual TLS with the coordinator."
    )
    tls_key: Annotated[Path | None, goes_with("tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    insecure: Annotated[bool, contradicts("tls_ca")] = Field(
        False, description="Speak plaintext even to a coordinator and a broker on other machines."
    )
    token: SecretStr | None = Field(
        None, description="The door's token; better in a file, and for the environment only."
    )
    token_file: Path | None = Field(
        None,
        description="File with a token of scope grid, read again when it changes; by default the operator's "
        "that a coordinator of this user on this machine has written.",
    )
    coordinator: Annotated[str, Field(min_length=1), keeps_plaintext_here("tls_ca")] = Field(
        "127.0.0.1:50051", description="Coordinator's address, host:port."
    )
    broker_tls_ca: Path | None = Field(
        None, description="PEM file with the CAs that may sign the broker's certificate; makes it TLS."
    )
    broker_tls_certificate: Annotated[Path | None, needs("broker_tls_ca")] = Field(
        None, description="PEM file with the door's own certificate, for mutual TLS with the broker."
    )
    broker_tls_key: Annotated[Path | None, goes_with("broker_tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    broker_token_file: Path | None = Field(
        None,
        description="File with the OAuth2 token that the broker is shown as a password, of user oauthtoken; "
        "read at every connection.",
    )
    broker: Annotated[str, AfterValidator(_host_and_port), keeps_plaintext_here("broker_tls_ca")] = Field(
        "127.0.0.1:1883", description="The MQTT broker's address, host:port."
    )
    keys: Path = Field(
        description="Folder with the public keys of those who are listened to: a JWK set for each, "
        "isv/IDENTIFIER.json or infra/IDENTIFIER.json."
    )
    signing_key: Path = Field(
        description="File with the private JWK, with a kid, that this agent signs with."
    )
    state: Path = Field(
        default_factory=default_state,
        description="File with what was accepted, which must outlive the door.",
    )
    heartbeat_s: float = Field(
        30.0, ge=1, le=3600, description="Between two power states where nothing happens, seconds."
    )
    log_level: LogLevel = Field("info", description="Least severe log lines that are shown.")
    log_format: LogFormat = Field("console", description="How log lines look: console or json.")

    @property
    def tls_files(self) -> TlsFiles | None:
        """Where the certificates are for the way to the coordinator; None for plaintext."""
        if self.tls_ca is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def broker_tls_files(self) -> TlsFiles | None:
        """Where the certificates are for the way to the broker; None for plaintext."""
        if self.broker_tls_ca is None:
            return None
        return TlsFiles(self.broker_tls_certificate, self.broker_tls_key, self.broker_tls_ca)
