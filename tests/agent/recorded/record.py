"""Records the runs of ranks again: `python -m tests.agent.recorded.record [NAME…]`.

To be used after intended changes of the ranks' behaviour; the commit's message then names the differences.
"""

import inspect
import sys

from tests.agent.recorded import scenarios
from tests.agent.recorded.runs import save


def main(names: list[str]) -> None:
    """Record the scenarios of these names, or all."""
    for name, scenario in inspect.getmembers(scenarios, inspect.isfunction):
        is_scenario = scenario.__module__ == scenarios.__name__ and not name.startswith("_")
        if is_scenario and (not names or name in names):
            node = scenarios.Node()
            scenario(node)
            save(name, node.steps)
            print(f"{name}: {len(node.steps)} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
