"""Credentials of the processes in a demo or test: mutual TLS and tokens, made for that run.

The only place that knows the environment variables that each kind of process needs.
"""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from perseus.certificates import Authority
from perseus.tls.channels import Channels
from perseus.tls.files import TlsFiles
from perseus.tls.tokens import TokenSource, own_token
from perseus.v1 import token_service_pb2
from perseus.v1.token_service_pb2_grpc import TokenServiceStub

AGENTS = "agents"
"""Name of the token that all agents share."""

_VALID_FOR = timedelta(days=30)
_TIMEOUT_S = 30.0


class Security:
    """An authority in a folder of its own, a coordinator's certificate for this machine, and a client's.

    `has_browsers`: the coordinator asks no client for a certificate, as browsers have only tokens.
    """

    def __init__(self, folder: Path, *, has_browsers: bool = False) -> None:
        self._has_browsers = has_browsers
        self.authority = Authority.create(folder, "Perseus demo", _VALID_FOR)
        self.ca = folder / "ca.pem"
        self.token_file = folder / "operator.token"
        own_token(self.token_file, f"perseus_{secrets.token_urlsafe(32)}")
        # Invalid until `admit_agents`: a running agent then reads it again.
        self.agent_token_file = folder / "agent.token"
        own_token(self.agent_token_file, f"perseus_{secrets.token_urlsafe(32)}")
        self._admitted: set[str] = set()
        self.coordinator_certificate, self.coordinator_key = self.renew_coordinator()
        self.client_certificate, self.client_key = self.renew_client()

    def renew_coordinator(self) -> tuple[Path, Path]:
        """Replace the coordinator's certificate by a new one."""
        names = ["localhost", "127.0.0.1", "::1"]
        return self.authority.issue(
            self.authority.folder / "coordinator", names, is_server=True, ends=datetime.now(UTC) + _VALID_FOR
        )

    def renew_client(self) -> tuple[Path, Path]:
        """Replace the certificate of agents and operators by a new one."""
        return self.authority.issue(
            self.authority.folder / "client", ["client"], is_server=False, ends=datetime.now(UTC) + _VALID_FOR
        )

    def admit_agents(self, address: str, name: str = AGENTS) -> None:
        """Let the coordinator make a token of that name, once, for the agents from now on.

        Its scope allows them to act for jobs, and nothing else.
        """
        if name in self._admitted:
            return
        request = token_service_pb2.CreateTokenRequest(
            name=name, scope=token_service_pb2.SCOPE_AGENT, job_patterns=["*"]
        )
        beside = self.agent_token_file.with_suffix(".new")
        own_token(beside, self._create_token(address, request))
        beside.replace(self.agent_token_file)
        self._admitted.add(name)

    def reader_token(self, address: str) -> str:
        """Let the coordinator make a token for the live page that changes nothing; return its secret."""
        request = token_service_pb2.CreateTokenRequest(name="page", scope=token_service_pb2.SCOPE_READER)
        return self._create_token(address, request)

    def _create_token(self, address: str, request: token_service_pb2.CreateTokenRequest) -> str:
        with self.channels(address).open_blocking() as channel:
            return TokenServiceStub(channel).CreateToken(request, timeout=_TIMEOUT_S).secret

    @property
    def client_files(self) -> TlsFiles:
        """The files of clients."""
        return TlsFiles(self.client_certificate, self.client_key, self.ca)

    def channels(self, address: str) -> Channels:
        """The way to the coordinator."""
        return Channels(address, self.client_files, TokenSource(path=self.token_file))

    def of_coordinator(self) -> Mapping[str, str]:
        """Environment variables of `perseus coordinator`."""
        variables = {
            "TLS_CERTIFICATE": str(self.coordinator_certificate),
            "TLS_KEY": str(self.coordinator_key),
            "OPERATOR_TOKEN_FILE": str(self.token_file),
        }
        if not self._has_browsers:
            variables["TLS_CLIENT_CA"] = str(self.ca)
        return {f"PERSEUS_COORDINATOR_{name}": value for name, value in variables.items()}

    def of_agent(self) -> Mapping[str, str]:
        """Environment variables of `perseus agent`."""
        variables = {**self._of_client(), "TOKEN_FILE": str(self.agent_token_file)}
        return {f"PERSEUS_AGENT_{name}": value for name, value in variables.items()}

    def of_operator(self) -> Mapping[str, str]:
        """Environment variables of commands that call the coordinator."""
        return {f"PERSEUS_{name}": value for name, value in self._of_client().items()}

    def _of_client(self) -> Mapping[str, str]:
        return {
            "TLS_CA": str(self.ca),
            "TLS_CERTIFICATE": str(self.client_certificate),
            "TLS_KEY": str(self.client_key),
            "TOKEN_FILE": str(self.token_file),
        }
