"""The address of a node's agent for a trainer's probe."""

SOCKET_VARIABLE = "PERSEUS_AGENT_SOCKET"
"""Environment variable with the socket's path, for the probe and for the agent (one of `AgentSettings`)."""

DEFAULT_SOCKET_PATH = "/run/perseus/agent.sock"
