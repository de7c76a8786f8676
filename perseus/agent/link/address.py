"""Where a trainer's probe finds the agent of its node."""

SOCKET_VARIABLE = "PERSEUS_AGENT_SOCKET"
"""The socket's path in the environment, for the probe as for the agent (one of `AgentSettings`)."""

DEFAULT_SOCKET_PATH = "/run/perseus/agent.sock"
