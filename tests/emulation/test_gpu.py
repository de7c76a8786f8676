import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perseus.agent.gpu import ClockNotSupportedError, EmulatedGpuError, Gpu, GpuNotFoundError
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A40, Work

LOW_MHZ, HIGH_MHZ = 870, 1740
MODEL = A40.with_clocks(12)
WORK = Work(compute_s=0.06, memory_s=0.04, activity=0.9)


class FakeTime:
    """A substitute for time.monotonic and time.sleep; `at` schedules an action during a sleep."""

    MIN_SLEEP_S = 1e-6
    """Sleep; even zero seconds take a moment."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._actions: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        until_s = self.now_s + max(duration_s, self.MIN_SLEEP_S)
        for due_s, action in sorted(self._actions, key=lambda pair: pair[0]):
            if due_s <= until_s:
                self._actions.remove((due_s, action))
                self.now_s = max(self.now_s, due_s)
                action()
        self.now_s = until_s

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        self._actions.append((due_s, action))


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def gpu(tmp_path: Path, fake_time: FakeTime) -> Iterator[EmulatedGpu]:
    gpu = EmulatedGpu.create(
        tmp_path / "gpu", MODEL, "GPU-a", monotonic=fake_time.monotonic, sleep=fake_time.sleep
    )
    yield gpu
    gpu.close()


def reopen(tmp_path: Path, fake_time: FakeTime) -> EmulatedGpu:
    return EmulatedGpu(tmp_path / "gpu", monotonic=fake_time.monotonic, sleep=fake_time.sleep)


def test_a_new_gpu_is_at_stock(gpu: EmulatedGpu) -> None:
    the_gpu: Gpu = gpu
    assert (the_gpu.uuid, the_gpu.name) == ("GPU-a", "NVIDIA A40")
    assert the_gpu.supported_clocks_mhz == MODEL.clocks_mhz
    assert the_gpu.sm_clock_mhz() == HIGH_MHZ
    assert the_gpu.total_energy_j() == 0
    assert the_gpu.power_w() == pytest.approx(70.38)
    assert the_gpu.clock_event_reasons() == 0


def test_an_unsupported_clock_is_refused(gpu: EmulatedGpu) -> None:
    with pytest.raises(ClockNotSupportedError) as caught:
        gpu.set_clock_mhz(875)
    assert str(caught.value) == (
        "GPU GPU-a: expected one of its 12 supported clocks (870 to 1740 MHz), "
        "found 875 MHz (nearest: 870 MHz)"
    )
    assert gpu.sm_clock_mhz() == HIGH_MHZ


def test_a_set_takes_its_latency_and_work_its_time_at_that_clock(
    gpu: EmulatedGpu, fake_time: FakeTime
) -> None:
    gpu.execute(WORK)
    assert fake_time.now_s == pytest.approx(1000.1, abs=1e-5)
    gpu.set_clock_mhz(LOW_MHZ)
    assert fake_time.now_s == pytest.approx(1000.1 + 0.01, abs=1e-5)
    assert gpu.sm_clock_mhz() == LOW_MHZ
    gpu.execute(WORK)
    assert fake_time.now_s == pytest.approx(1000.1 + 0.01 + 0.16, abs=1e-5)
    gpu.reset_clock()
    assert gpu.sm_clock_mhz() == HIGH_MHZ


@pytest.mark.parametrize("set_after_s", [0.0001 + 0.0013 * step for step in range(76)])
def test_execute_sees_every_set_of_another_process_in_time(
    gpu: EmulatedGpu, tmp_path: Path, fake_time: FakeTime, set_after_s: float
) -> None:
    gpu.set_clock_mhz(LOW_MHZ)
    begin_s = fake_time.now_s
    agent = EmulatedGpu(tmp_path / "gpu", monotonic=fake_time.monotonic, sleep=lambda _s: None)
    fake_time.at(begin_s + set_after_s, lambda: agent.set_clock_mhz(HIGH_MHZ))
    gpu.execute(Work(compute_s=0.05, memory_s=0.0))
    agent.close()
    in_force_after_s = min(set_after_s + MODEL.set_latency_s, 0.1)  # at the low clock it would take 0.1 s
    expected_s = in_force_after_s + (1 - in_force_after_s / 0.1) * 0.05
    assert fake_time.now_s - begin_s == pytest.approx(expected_s, abs=2 * FakeTime.MIN_SLEEP_S)


def test_degraded_work_takes_longer(gpu: EmulatedGpu, tmp_path: Path, fake_time: FakeTime) -> None:
    other = reopen(tmp_path, fake_time)
    fake_time.at(1000.05, lambda: other.degrade(1.5, clock_event_reasons=0x40))
    gpu.execute(WORK)
    # The work in progress was to end 0.05 s later; the degradation is seen at the next poll, within 10 ms.
    assert fake_time.now_s == pytest.approx(1000.125, abs=1e-5)
    assert gpu.clock_event_reasons() == 0x40
    other.degrade(1.0)
    other.close()
    begin_s = fake_time.now_s
    gpu.execute(WORK)
    assert fake_time.now_s - begin_s == pytest.approx(0.1, abs=1e-5)
    assert gpu.clock_event_reasons() == 0


def test_a_cap_limits_the_clock_and_reports_its_reasons(gpu: EmulatedGpu, fake_time: FakeTime) -> None:
    gpu.cap(LOW_MHZ, clock_event_reasons=0x20)
    assert (gpu.sm_clock_mhz(), gpu.clock_event_reasons()) == (LOW_MHZ, 0x20)
    begin_s = fake_time.now_s
    gpu.execute(WORK)
    assert fake_time.now_s - begin_s == pytest.approx(0.16, abs=1e-5)
    gpu.set_clock_mhz(LOW_MHZ)
    assert gpu.clock_event_reasons() == 0, "the requested clock is below the cap"
    gpu.reset_clock()
    gpu.cap(None)
    assert (gpu.sm_clock_mhz(), gpu.clock_event_reasons()) == (HIGH_MHZ, 0)


def test_a_power_limit_caps_the_clock_so_that_all_work_keeps_it(gpu: EmulatedGpu) -> None:
    assert gpu.power_limit_w() == MODEL.board_power_w
    gpu.limit_power(200.0)
    assert gpu.power_limit_w() == 200.0
    reached_mhz = gpu.sm_clock_mhz()
    higher_mhz = MODEL.clocks_mhz[MODEL.clocks_mhz.index(reached_mhz) - 1]
    assert MODEL.power_w(1.0, reached_mhz) <= 200.0 < MODEL.power_w(1.0, higher_mhz)
    assert gpu.clock_event_reasons() == 0x4
    gpu.limit_power(MODEL.board_power_w)
    assert (gpu.sm_clock_mhz(), gpu.clock_event_reasons()) == (HIGH_MHZ, 0)
    with pytest.raises(EmulatedGpuError, match=r"power limit: expected at least \d+ W, found 10 W"):
        gpu.limit_power(10.0)


@pytest.mark.parametrize("slowdown", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_slowdown_is_refused(gpu: EmulatedGpu, slowdown: float) -> None:
    with pytest.raises(EmulatedGpuError, match="slowdown: expected a positive number"):
        gpu.degrade(slowdown)


def test_a_gpu_is_not_created_twice(gpu: EmulatedGpu, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        EmulatedGpu.create(tmp_path / "gpu", MODEL, "GPU-b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpu"]


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GpuNotFoundError, match="nowhere: expected an emulated GPU, found no such file"):
        EmulatedGpu(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "found one that begins with b''"),
        (lambda content: b"something else entirely", "found one that begins with b'somethin'"),
        (lambda content: content[:8] + b"\x63" + content[9:], "of version 2, found 99"),
        (lambda content: content[:-1], r"of \d+ bytes, found \d+"),
        (lambda content: content[:40], r"of \d+ bytes, found 40"),
        (lambda content: content + b"\0", r"of \d+ bytes, found \d+"),
    ],
)
def test_a_foreign_or_truncated_file_is_refused(
    gpu: EmulatedGpu, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(damage((tmp_path / "gpu").read_bytes()))
    with pytest.raises(EmulatedGpuError, match=message):
        EmulatedGpu(damaged)


def test_threads_share_one_gpu(tmp_path: Path) -> None:
    gpu = EmulatedGpu.create(tmp_path / "gpu", MODEL, "GPU-a")
    stop = threading.Event()
    readings_j: list[float] = []

    def read() -> None:
        while not stop.is_set():
            readings_j.append(gpu.total_energy_j())

    reader = threading.Thread(target=read)
    reader.start()
    for clock_mhz in MODEL.clocks_mhz:
        gpu.set_clock_mhz(clock_mhz)
        assert gpu.sm_clock_mhz() == clock_mhz
    stop.set()
    reader.join()
    gpu.close()
    assert readings_j == sorted(readings_j)
    assert readings_j[-1] > 0


TRAINER = """
import sys
from pathlib import Path
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
gpu = EmulatedGpu(Path(sys.argv[1]))
gpu.execute(Work(compute_s=0.2, memory_s=0.1))
print(gpu.sm_clock_mhz())
"""


def test_a_trainer_in_another_process_computes_at_the_agent_s_clock(tmp_path: Path) -> None:
    agent = EmulatedGpu.create(tmp_path / "gpu", MODEL, "GPU-a")
    agent.set_clock_mhz(LOW_MHZ)
    before_j = agent.total_energy_j()
    clock_mhz = subprocess.check_output([sys.executable, "-c", TRAINER, tmp_path / "gpu"], text=True)
    energy_j = agent.total_energy_j() - before_j
    agent.close()
    assert int(clock_mhz) == LOW_MHZ
    # The work takes 0.2 · 2 + 0.1 = 0.5 s, of which the counter shows all but its last 0.1 s.
    assert energy_j > 0.4 * MODEL.power_w(1.0, LOW_MHZ)
