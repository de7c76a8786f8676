"""The way to the coordinator that an agent's settings describe."""

from perseus.agent.sidecar.settings import AgentSettings
from perseus.tls.address import is_local
from perseus.tls.channels import Channels
from perseus.tls.tokens import find_token


def channels_of(settings: AgentSettings) -> Channels:
    """Return how an agent reaches its coordinator, and what it shows there.

    Raises:
        TlsError: a certificate can't be used.
        TokenFileError: what is said to hold a token holds none.
    """
    token = find_token(
        path=settings.token_file,
        token=settings.token.get_secret_value() if settings.token is not None else None,
        is_local=is_local(settings.coordinator),
    )
    return Channels(settings.coordinator, settings.tls_files, token)
