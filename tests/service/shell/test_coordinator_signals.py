"""Jobs that follow a signal, on a real coordinator with a real store; and the sources of signals."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.testing import capture_logs

from perseus.service.domain.ledger import Rates
from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.series import Signal
from perseus.service.shell.signals import NamedSignal, Signals
from perseus.service.signals.source import SourceError
from perseus.v1 import event_pb2, job_pb2
from tests.service.grpc_fakes import (
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    job_once,
    make_settings,
    planned,
    until,
)

DIRTY, CLEAN = (500.0, 500.0, *[100.0] * 30), (100.0, 100.0, *[500.0] * 30)
"""The second hour equals the first, which may end while a test runs."""

LEAST_CARBON = job_pb2.OperatingPolicy(
    least_carbon=job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=10, horizon_s=86_400))
)

UNTIL = job_pb2.OperatingPolicy(
    least_cost=job_pb2.LeastSignal(
        work_until=job_pb2.WorkUntil(iteration_count=10**6, end_time=Timestamp(seconds=10**10))
    )
)


def write(path: Path, values: Sequence[float], begin_s: float | None = None) -> None:
    """Write hourly values from the present hour on, or from another time."""
    begin_s = HOUR_S * (time.time() // HOUR_S) if begin_s is None else begin_s
    rows = "".join(f"{begin_s + index * HOUR_S:.0f},{value}\n" for index, value in enumerate(values))
    new = path.with_suffix(".new")
    new.write_text(f"timestamp,g\n{rows}")
    os.replace(new, path)


def settings(folder: Path, **changes: Any) -> Any:
    signals = {"grid": {"kind": "carbon", "csv": folder / "carbon.csv", "column": "g"}}
    return make_settings(folder, **{"signals": signals, **changes})


async def set_policy(client: Client, policy: job_pb2.OperatingPolicy) -> None:
    assert (await client.ask("SetPolicy", job_id="job", policy=policy)).job.policy == policy


async def following(client: Client, *, slow: bool, has_signal: bool = True) -> job_pb2.Job:
    """Wait until a job follows its signal, or is without one; return it."""
    state = job_pb2.SIGNAL_TARGET_STATE_FOLLOWING if has_signal else job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL

    def is_so(job: job_pb2.Job) -> bool:
        target = job.signal_target
        return target.state == state and target.HasField("iteration_time_s") == slow

    return await job_once(client, is_so)


async def signal_events(client: Client) -> list[event_pb2.SignalTargetSet]:
    types = [event_pb2.JOB_EVENT_TYPE_SIGNAL_TARGET_SET]
    events = (await client.ask("ListJobEvents", job_id="job", types=types)).events
    return [event.signal_target_set for event in events]


@asynccontextmanager
async def slowed(folder: Path) -> AsyncIterator[tuple[Client, FakeAgent, float]]:
    """A job that was planned, and is slow since energy is dirty; and its iteration time before that."""
    write(folder / "carbon.csv", DIRTY)
    async with connected(settings(folder)) as client:
        agent = await planned(client)
        before_s = (await client.job()).max_planned_iteration_time_s
        await set_policy(client, LEAST_CARBON)
        await following(client, slow=True)
        yield client, agent, before_s


async def test_a_job_is_slow_while_energy_is_dirty_but_not_without_a_signal(tmp_path: Path) -> None:
    async with slowed(tmp_path) as (client, agent, before_s):
        await agent.iterate(4)
        job = await client.job()
        assert before_s < job.max_planned_iteration_time_s <= job.signal_target.iteration_time_s
        assert job.signal_target.value_per_kwh == 500.0
        assert job.signal_target.done_count == 4
        assert job.spec.policy == job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown()), "as registered"
        write(tmp_path / "carbon.csv", CLEAN)
        await following(client, slow=False)
        write(tmp_path / "carbon.csv", DIRTY)
        await following(client, slow=True)
        write(tmp_path / "carbon.csv", (400.0,), begin_s=time.time() - 5 * HOUR_S)
        # Forecasts of later hours disappear with a file that contains earlier ones only.
        await following(client, slow=False, has_signal=False)

        async def are_reported() -> bool:
            return len(await signal_events(client)) == 4

        await until(are_reported)
        targets = [each.signal_target for each in await signal_events(client)]
        assert [target.HasField("iteration_time_s") for target in targets] == [True, False, True, False]
        assert targets[-1].state == job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL
        assert not targets[-1].HasField("value_per_kwh")
        await set_policy(client, UNTIL)
        until_then = await job_once(client, lambda job: job.signal_target.iteration_count == 10**6)
        assert until_then.signal_target.end_time.seconds == 10**10
        await set_policy(client, job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown()))
        assert not (await client.job()).HasField("signal_target")


async def test_a_restart_keeps_the_window_and_its_progress(tmp_path: Path) -> None:
    async with slowed(tmp_path) as (client, agent, _):
        await agent.iterate(6)
        before = (await client.job()).signal_target
    assert before.done_count == 6
    async with connected(settings(tmp_path)) as client:
        agent.use(client)
        await agent.join()
        await agent.iterate(5)
        again = (await client.job()).signal_target
        assert (again.start_time, again.end_time) == (before.start_time, before.end_time)
        assert again.iteration_count == before.iteration_count
        assert again.done_count == 11
        assert again.iteration_time_s == before.iteration_time_s
        assert len(await signal_events(client)) == 1, "an unchanged target is not sent again"


async def test_the_ledger_takes_the_signals_value_of_the_hour(tmp_path: Path) -> None:
    write(tmp_path / "carbon.csv", (250.0, 250.0))
    rates = {"price_per_kwh": 0.2, "intensity_g_per_kwh": 999.0}
    async with connected(settings(tmp_path, **rates)) as client:
        agent = await planned(client)

        async def is_priced() -> bool:
            await agent.iterate(1)
            total = (await client.ask("ListLedgerEntries")).total
            return bool(total.intensity_g_per_kwh == pytest.approx(250.0))

        await until(is_priced)
        total = (await client.ask("ListLedgerEntries")).total
        assert total.price_per_kwh == pytest.approx(0.2)
        assert total.carbon_g == pytest.approx(250.0 * total.energy_kwh)


class Scripted:
    """A source that returns one result after the other, and then repeats the last one."""

    period_s = 0.001

    def __init__(self, *responses: Signal | Exception | None) -> None:
        self._responses = list(responses)
        self.read_count = 0
        self.is_closed = False

    async def read(self, now_s: float) -> Signal | None:
        self.read_count += 1
        found = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        self.is_closed = True


def constant(value: float, kind: SignalKind = SignalKind.CARBON) -> Signal:
    return Signal(kind, (0.0,), (value,), HOUR_S)


async def read_through(signals: Signals, sources: Sequence[Scripted], count: int) -> list[Any]:
    with capture_logs() as logs:
        running = asyncio.create_task(signals.run())
        async with asyncio.timeout(TIMEOUT_S):
            while any(source.read_count < count for source in sources):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert all(source.is_closed for source in sources)
    return [(line["event"], line.get("cause", "")) for line in logs if line["log_level"] != "debug"]


async def test_a_failing_source_is_logged_once_and_its_last_value_still_counts() -> None:
    source = Scripted(
        constant(100.0),
        *[SourceError("it is down")] * 3,
        SourceError("it is odd"),
        KeyError("a fault"),
        constant(200.0),
        None,
    )
    named = NamedSignal("grid", SignalKind.CARBON, (), source)
    signals = Signals([named], Rates(0.3, 400.0), clock=lambda: 0.0)
    assert signals.rates_at({}, 0.0) == Rates(0.3, 400.0)
    assert list(signals.states()) == [("grid", False, 0)]
    message = await read_through(signals, [source], 9)
    assert message == [
        ("signal can't be read", "it is down"),
        ("signal can't be read", "it is odd"),
        ("signal can't be read", "a fault: KeyError('a fault')"),
        ("signal is read again", ""),
    ]
    assert named.history.value_at(0.0) == 200.0
    assert named.history.version == 2
    assert list(signals.states()) == [("grid", True, 5)]


async def test_each_feed_has_its_own_signal_or_the_one_for_all() -> None:
    sources = [Scripted(constant(value), None) for value in (100.0, 500.0)]
    prices = Scripted(constant(-0.5, SignalKind.PRICE), None)
    signals = Signals(
        [
            NamedSignal("all", SignalKind.CARBON, (), sources[0]),
            NamedSignal("hall", SignalKind.CARBON, ("hall", "annex"), sources[1]),
            NamedSignal("price", SignalKind.PRICE, ("hall",), prices),
        ],
        Rates(None, 400.0),
        clock=lambda: 0.0,
    )
    await read_through(signals, [*sources, prices], 2)
    assert signals.rates_at({"hall": 0.25, "default": 0.75}, 0.0) == Rates(None, 200.0)
    assert signals.rates_at({"hall": 1.0}, 0.0) == Rates(-0.5, 500.0)
    assert signals.rates_at({}, 0.0) == Rates(None, 100.0)
    assert signals.rates_at({"hall": 1.0}, 100 * HOUR_S) == Rates(None, 400.0), "without a signal's value"
    max_on_hall = signals.history(SignalKind.CARBON, {"default": 0.4, "annex": 0.6})
    assert max_on_hall is not None
    assert max_on_hall.value_at(0.0) == 500.0
    assert signals.history(SignalKind.PRICE, {"default": 1.0}) is None
