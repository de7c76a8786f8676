"""What moving layers would bring a job: computed once for its frontier, if somebody knows its layers."""

import asyncio
import json
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
from perseus.v1.frontier_service_pb2 import GetRebalancingRequest
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected_to,
    make_settings,
    refusal,
    running_here,
)


async def register(client: Client, *layer_counts: list[int]) -> None:
    job = await client.register(layers=layer_counts)
    assert [[*each.layer_counts] for each in job.spec.stage_work] == [*layer_counts]


async def planned(client: Client) -> None:
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)


async def rebalancing(client: Client, *layers: int) -> Rebalancing:
    request = GetRebalancingRequest(job_id="job", layer_counts=layers)
    found: Rebalancing = (await client.frontiers.GetRebalancing(request, timeout=TIMEOUT_S)).rebalancing
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
        await register(client, [4], [6])
        early = GetRebalancingRequest(job_id="job")
        assert (await refusal(client.frontiers.GetRebalancing(early, timeout=TIMEOUT_S)))[
            1
        ] == "JOB_NOT_SOLVED"
        await planned(client)
        # A caller that gives up leaves the work to the next.
        with pytest.raises(grpc.aio.AioRpcError):
            await client.frontiers.GetRebalancing(early, timeout=0.001)
        found, again = await asyncio.gather(rebalancing(client), rebalancing(client))
        assert found == again == await rebalancing(client)
        assert [*found.present.layer_counts] == [4, 6]
        assert rebalanced == [[4, 6]]
        other = await rebalancing(client, 5)
        assert [*other.present.layer_counts] == [5, 5]
        assert rebalanced == [[4, 6], [5, 5]]

        def run(*arguments: str) -> str:
            flags = ["--coordinator", address, "--insecure"]
            result = CliRunner().invoke(app, ["jobs", *arguments, *flags], env={"COLUMNS": "200"})
            assert result.exit_code == 0, result.output
            return result.output

        shown = await asyncio.to_thread(run, "show", "job")
        assert "moving layers" in shown
        table = await asyncio.to_thread(run, "rebalancing", "job", "--layers", "4,6")
        assert "4,6" in table
        assert "layers are equal" in table
        document = json.loads(await asyncio.to_thread(run, "rebalancing", "job", "--format", "json"))
        assert document["present"]["layer_counts"] == [4, 6]


@pytest.mark.slow("plans a job")
async def test_without_layers_there_is_no_advice(tmp_path: Path) -> None:
    async with running_here(make_settings(tmp_path)) as (address, _), connected_to(address) as client:
        await register(client)
        await planned(client)
        assert not (await client.job()).spec.stage_work
        for layers, reason in (((), "LAYERS_UNKNOWN"), ((1, 2, 3), "INVALID_PROBLEM")):
            request = GetRebalancingRequest(job_id="job", layer_counts=layers)
            assert (await refusal(client.frontiers.GetRebalancing(request, timeout=TIMEOUT_S)))[1] == reason


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([[4], [6], [1]], "stage_work: expected none, or one for each of 2 stages, found 3"),
        ([[4], [3, 3]], "stage_work[1].layer_counts: expected none, or one for each of 1 chunks, found 2"),
        ([[4], [0]], "stage_work[1].layer_counts: expected 1 to 10000, found 0"),
    ],
)
async def test_layers_that_do_not_fit_the_job_are_refused(
    tmp_path: Path, counts: list[list[int]], found: str
) -> None:
    async with running_here(make_settings(tmp_path)) as (address, _), connected_to(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await register(client, *counts)
        assert found in str(refused.value.details())
