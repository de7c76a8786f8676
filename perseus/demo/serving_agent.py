"""The agent of the inference demo: it remembers 20 s of late requests instead of three minutes.

With three, clocks stay up for as long after a high load, as nobody knows when it comes back.
`python -m perseus.demo.serving_agent SETTINGS.toml`
"""

import asyncio
import sys
from pathlib import Path

from perseus import configuration, logs
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import run
from perseus.serving import controller, prediction

REMEMBERED_S = 20.0
_REMEMBERED_COUNT = 20.0


def main() -> None:
    """Run the agent until SIGTERM."""
    for module in (prediction, controller):
        vars(module)["LATE_S"] = REMEMBERED_S
    prediction._LATE_COUNT = _REMEMBERED_COUNT
    settings = configuration.load(AgentSettings, Path(sys.argv[1]), {})
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
