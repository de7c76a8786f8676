"""What moving layers would bring a job: computed once for its frontier, if somebody knows its layers."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.service.solving import work
from perseus.solver import rebalance
from perseus.v1 import job_pb2
from perseus.v1.frontier_pb2 import Rebalancing
from tests.service.grpc_fakes import Client, connected_to, joined, make_settings, refusal, running_here


async def planned(client: Client, *layer_counts: list[int]) -> None:
    agent = await joined(client, layers=layer_counts)
    work_of_stages = (await client.job()).spec.stage_work
    assert [[*each.layer_counts] for each in work_of_stages] == [*layer_counts]
    assert (await refusal(client.ask("GetRebalancing", job_id="job")))[1] == "JOB_NOT_SOLVED"
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)


async def rebalancing(client: Client, *layers: int) -> Rebalancing:
    answer = await client.ask("GetRebalancing", job_id="job", layer_counts=layers)
    found: Rebalancing = answer.rebalancing
    return found


@pytest.fixture
def rebalanced(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the layers of every computation: the workers are threads here."""
    seen: list[list[int]] = []

    def recorded(frontier: Any, layers: Any) -> Any:
        seen.append([*layers])
        return rebalance(frontier, layers)

    monkeypatch.setattr(work, "rebalance", recorded)
    return seen


@pytest.mark.slow("plans a job, and rebalances it")
async def test_advice_is_computed_once_for_the_registered_layers(
    tmp_path: Path, rebalanced: list[list[int]]
) -> None:
    async with running_here(make_settings(tmp_path)) as (address, _), connected_to(address) as client:
        await planned(client, [4], [6])
        # A caller that gives up leaves the work to the next.
        with pytest.raises(grpc.aio.AioRpcError):
            await client.ask("GetRebalancing", job_id="job", timeout_s=0.001)
        found, again = await asyncio.gather(rebalancing(client), rebalancing(client))
        assert found == again == await rebalancing(client)
        assert [*found.present.layer_counts] == [4, 6]
        assert rebalanced == [[4, 6]]
        other = await rebalancing(client, 5)
        assert [*other.present.layer_counts] == [5, 5]
        assert rebalanced == [[4, 6], [5, 5]]

        show = ["jobs", "show", "job", "--coordinator", address, "--insecure"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, show, env={"COLUMNS": "200"})
        assert "moving layers" in shown.output


@pytest.mark.slow("plans a job")
async def test_without_layers_there_is_no_advice(client: Client) -> None:
    await planned(client)
    assert not (await client.job()).spec.stage_work
    for layers, reason in (((), "LAYERS_UNKNOWN"), ((1, 2, 3), "INVALID_PROBLEM")):
        assert (await refusal(rebalancing(client, *layers)))[1] == reason
