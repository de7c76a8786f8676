"""The emulated trainer with children that outlive it, as trainers often have.

One is forked, like data loaders and checkpoint writers. The other holds the connection to the agent, like a
child forked by a library without Python's knowledge. Both end by themselves after a while.

python -m tests.nvml.trainer_with_children TASK
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

from perseus.agent.probe.client import Probe
from perseus.demo.trainer import RankTask, train

CHILDREN_LIVE_S = 20


def have_children(connection: int) -> None:
    """Start two children, one of which holds the connection."""
    if os.fork() == 0:
        os.closerange(3, 1024)  # the emulated GPU's lock must not outlive the trainer
        time.sleep(CHILDREN_LIVE_S)
        os._exit(0)
    subprocess.Popen(["sleep", str(CHILDREN_LIVE_S)], pass_fds=[connection])


class ProbeWithChildren(Probe):
    """A probe that starts the children once it is connected."""

    def register(self, **arguments: Any) -> bool:
        done = super().register(**arguments)
        connection = self._connection._socket
        if connection is not None:
            have_children(connection.fileno())
        return done


if __name__ == "__main__":
    from perseus.demo import trainer

    trainer.Probe = ProbeWithChildren  # type: ignore[attr-defined]
    train(RankTask(**json.loads(sys.argv[1])))
