"""The agent's settings: flags, environment (PERSEUS_AGENT_…) and TOML file; see `perseus.configuration`."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from perseus.agent.link.address import DEFAULT_SOCKET_PATH
from perseus.agent.restore.records import ClockRange
from perseus.agent.sidecar.instance_settings import InstanceSettings
from perseus.job_id import JOB_ID_RULE, is_job_id
from perseus.logs import LogFormat, LogLevel
from perseus.tls.address import check_address, host_and_port, is_local
from perseus.tls.fields import contradicts, goes_with, keeps_plaintext_here, needs
from perseus.tls.files import TlsFiles


def default_restore_folder() -> Path:
    """Return root's /var/lib/perseus/restore, or a folder under $XDG_STATE_HOME (~/.local/state)."""
    if os.geteuid() == 0:
        return Path("/var/lib/perseus/restore")
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "perseus" / "restore"


class AgentSettings(BaseSettings):
    """Settings of an agent."""

    model_config = SettingsConfigDict(env_prefix="PERSEUS_AGENT_", extra="forbid", frozen=True)

    tls_ca: Path | None = Field(
        None, description="PEM file with the CAs that may sign the coordinator's certificate; makes it TLS."
    )
    tls_certificate: Annotated[Path | None, needs("tls_ca")] = Field(
        None, description="PEM file with the agent's certificate, for mutual TLS."
    )
    tls_key: Annotated[Path | None, goes_with("tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    insecure: Annotated[bool, contradicts("tls_ca")] = Field(
        False, description="Speak plaintext even to a coordinator on another machine."
    )
    token: SecretStr | None = Field(
        None, description="The agent's token; only for the environment. A file is better."
    )
    token_file: Path | None = Field(
        None,
        description="File with the agent's token, reloaded when it changes; by default the token written by "
        "this user's coordinator on this machine.",
    )
    coordinator: Annotated[str, Field(min_length=1), keeps_plaintext_here("tls_ca", is_list=True)] = Field(
        "127.0.0.1:50051", description="Coordinator's address, host:port; of a fleet, several with commas."
    )
    socket: Path = Field(Path(DEFAULT_SOCKET_PATH), description="Local socket that trainers connect to.")
    socket_group: str | None = Field(
        None,
        description="Group whose members may connect to the socket; by default perseus, if the node has it "
        "and the agent may give files to it, else only the agent's user.",
    )
    socket_mode: str = Field("0660", description="Permissions of the socket, octal.")
    grants: Path = Field(
        Path("/etc/perseus/grants"), description="Folder of files with the users' permissions to claim GPUs."
    )
    gpu_backend: Literal["nvml", "emulated"] = Field(
        "nvml", description="Source of this node's GPUs: nvml or emulated."
    )
    emulated_gpus: Path | None = Field(
        None, validate_default=True, description="Folder with one state file per emulated GPU."
    )
    device_folder: Path = Field(
        Path("/dev"), description="Folder with the GPUs' device nodes, nvidia0 and so on."
    )
    observe: bool = Field(False, description="Measure, but never set a clock; needs no privileges.")
    restore_folder: Path = Field(
        default_factory=default_restore_folder,
        description="Folder with a record of every GPU whose clocks are changed; it must outlive the agent.",
    )
    restore_clocks: str | None = Field(
        None, description="MIN,MAX in MHz: lock GPUs to this range when done, instead of unlocking them."
    )
    metrics_tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate for scrapers of the metrics; makes them HTTPS."
    )
    metrics_tls_key: Annotated[Path | None, goes_with("metrics_tls_certificate")] = Field(
        None, validate_default=True, description="PEM file with that certificate's private key."
    )
    metrics_token_file: Path | None = Field(
        None, description="File with the token that scrapers of the metrics must present."
    )
    metrics_listen: str | None = Field(
        None,
        description="[HOST:]PORT where /metrics is served over HTTP, on loopback unless a host is named; "
        "needs perseus-energy[metrics], and beyond loopback a certificate and a token.",
    )
    job_mapping_folder: Path | None = Field(
        None,
        description="Folder with a file for each GPU that runs a job, for dcgm-exporter's "
        "--hpc-job-mapping-dir.",
    )
    instances: dict[str, InstanceSettings] = Field(
        default={}, description="Inference engines by name, whose clocks follow their objectives."
    )
    log_level: LogLevel = Field("info", description="Lowest level of log lines.")
    log_format: LogFormat = Field("console", description="Format of log lines: console or json.")

    @field_validator("instances")
    @classmethod
    def _are_instances(cls, instances: dict[str, InstanceSettings]) -> dict[str, InstanceSettings]:
        taken: dict[str, str] = {}
        for name, instance in instances.items():
            if not is_job_id(name):
                raise ValueError(f"expected as an instance's name {JOB_ID_RULE}, found {name!r}")
            for gpu in instance.gpus:
                if gpu in taken:
                    raise ValueError(f"expected each GPU once, found {gpu} in {taken[gpu]} and {name}")
                taken[gpu] = name
        return instances

    @field_validator("metrics_listen")
    @classmethod
    def _is_no_metrics_for_everybody(cls, listen: str | None, info: ValidationInfo) -> str | None:
        if listen is None:
            return None
        address = listen if ":" in listen else f"127.0.0.1:{listen}"
        if host_and_port(address) is None:
            raise ValueError("expected [HOST:]PORT, with a port from 0 to 65535")
        check_address(address, min_port=0)
        needed = (info.data.get("metrics_tls_certificate"), info.data.get("metrics_token_file"))
        if not is_local(address) and None in needed:
            raise ValueError(
                "expected metrics_tls_certificate and metrics_token_file for an address beyond loopback"
            )
        return address

    @field_validator("emulated_gpus")
    @classmethod
    def _goes_with_its_backend(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if info.data.get("gpu_backend") == "emulated" and folder is None:
            raise ValueError("expected a folder, as gpu_backend is emulated")
        return folder

    @field_validator("socket_mode")
    @classmethod
    def _is_a_mode(cls, text: str) -> str:
        if len(text) > 4 or not text.isascii() or not text.isdecimal() or "8" in text or "9" in text:
            raise ValueError("expected permissions as octal digits, such as 0660")
        if int(text, 8) & ~0o777 or int(text, 8) & 0o600 != 0o600:
            raise ValueError("expected permissions from 0600 to 0777 that let the owner read and write")
        return text

    @field_validator("restore_clocks")
    @classmethod
    def _is_a_range(cls, text: str | None) -> str | None:
        if text is not None:
            ClockRange.parse(text)
        return text

    @property
    def tls_files(self) -> TlsFiles | None:
        """TLS files for the connection to the coordinator; None for plaintext."""
        if self.tls_ca is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def metrics_tls_files(self) -> TlsFiles | None:
        """TLS files of the metrics endpoint; None for plaintext."""
        if self.metrics_tls_certificate is None:
            return None
        return TlsFiles(self.metrics_tls_certificate, self.metrics_tls_key)

    @property
    def stock(self) -> ClockRange | None:
        """The clocks to restore: a range to lock the GPUs to, or their own clocks (None)."""
        return ClockRange.parse(self.restore_clocks) if self.restore_clocks is not None else None
