"""The example agent in Node.js, under a real coordinator."""

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from perseus.job_id import slot_of
from tests.languages.newer import newer_ends
from tests.languages.processes import ClientProcess, CoordinatorProcess, check_story
from tests.service.storage import postgresql

EXAMPLE = Path(__file__).parents[2] / "examples" / "nodejs"
SPEED = "5"

pytestmark = [
    pytest.mark.slow("an agent in a process of its own under a real coordinator"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        shutil.which("node") is None or not (EXAMPLE / "node_modules").exists(),
        reason="Node.js or the example's packages are not installed here; `make test-languages` has them",
    ),
]


def start(target: str, folder: Path, environment: Mapping[str, str] | None = None) -> ClientProcess:
    return ClientProcess(
        ["node", "main.js", target],
        EXAMPLE,
        folder / "client.log",
        PERSEUS_JOB="story",
        PERSEUS_SPEED=SPEED,
        **(environment or {}),
    )


def test_the_whole_scenario(tmp_path: Path) -> None:
    with (
        CoordinatorProcess(tmp_path) as coordinator,
        start(coordinator.address, tmp_path, coordinator.of_client) as client,
    ):
        printed = client.wait()
        check_story(coordinator, "story")
    assert "serving: SERVING" in printed
    assert "perseus.v1.AgentService" in printed.split("services: ")[1].splitlines()[0]
    assert "event STRAGGLER_REPORTED [stragglerReported]" in printed
    assert "event PLAN_IN_FORCE [pipelineClocks]" in printed
    assert "report PLANNED" in printed


def test_a_coordinator_is_killed_and_restarted(tmp_path: Path) -> None:
    with (
        CoordinatorProcess(tmp_path) as coordinator,
        start(coordinator.address, tmp_path, coordinator.of_client) as client,
    ):
        client.wait_for("→ planned: ")  # the plans are offered, but not yet in force
        coordinator.kill()
        coordinator.start()
        printed = client.wait()
        check_story(coordinator, "story")
    assert "stream ended: 14" in printed
    assert printed.count("connected: ") == 2


async def test_unknown_fields_and_messages_are_ignored(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        async with newer_ends(coordinator.channels) as address:
            with start(address, tmp_path) as client:
                printed = await client.wait_async()
        check_story(coordinator, "story")
    assert printed.count("refused an unknown message") == 1
    assert printed.count("message refused: UNKNOWN_MESSAGE") == 1
    assert "stream ended" not in printed


@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_a_job_is_followed_to_the_coordinator_of_its_slot(tmp_path: Path) -> None:
    with ExitStack() as stack:
        database = stack.enter_context(postgresql.running()).new_database()
        coordinators = []
        for slot in range(2):  # the first takes the first
            (tmp_path / str(slot)).mkdir()
            made = CoordinatorProcess(tmp_path / str(slot), has_tls=False, database=database, slot_count=2)
            coordinators.append(stack.enter_context(made))
        own = slot_of("story", 2)
        with start(coordinators[1 - own].address, tmp_path) as client:
            client.wait_for("→ planned: ")
            assert "SERVED_ELSEWHERE" not in client.text, "the registration was followed already"
            coordinators[
                own
            ].kill()  # so that a rank is announced, and refused, where the other slot is served
            coordinators[own].start()
            printed = client.wait()
            check_story(coordinators[own], "story")
    assert "rank refused: SERVED_ELSEWHERE" in printed
    assert "report PLANNED" in printed


def test_the_rules_of_offers() -> None:
    subprocess.run(["node", "--test"], cwd=EXAMPLE, check=True)


def test_the_stable_reason_of_an_error_is_decoded(tmp_path: Path) -> None:
    script = """
        import { Coordinator, infoOf } from './coordinator.js';
        const coordinator = new Coordinator(process.argv[1]);
        const show = (error) => console.log(infoOf(error).reason);
        await coordinator.call('getJob', { jobId: 'none' }).catch(show);
        coordinator.close();
    """
    with CoordinatorProcess(tmp_path) as coordinator:
        command = ["node", "--input-type=module", "--eval", script, coordinator.address]
        with ClientProcess(command, EXAMPLE, tmp_path / "client.log", **coordinator.of_client) as client:
            assert client.wait().split() == ["JOB_NOT_FOUND"]
