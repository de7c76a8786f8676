"""Agents in Node.js and in Java (its stubs by the contract's options) under real coordinators.

The common generators accept the contract, and their output has the names of docs/protocol.md.
"""

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from perseus.demo.processes import Coordinator, Process
from perseus.demo.security import Security
from perseus.job_id import slot_of
from perseus.tls.channels import Channels
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.languages.newer import newer_ends
from tests.ports import free_port
from tests.service.storage import postgresql

pytestmark = [
    pytest.mark.slow("an agent in a process of its own under a real coordinator"),
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "nodejs"
SOURCES = Path(__file__).parent / "java"
JARS = Path("/usr/share/java")
SPEED = "5"

# Debian's packages of gRPC and of its run-time dependencies.
CLASSPATH = [
    *(JARS / f"{name}.jar" for name in ("grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-stub")),
    *(JARS / f"{name}.jar" for name in ("grpc-protobuf", "grpc-protobuf-lite", "protobuf", "guava")),
    *(JARS / f"{name}.jar" for name in ("perfmark-api", "jctools-core", "geronimo-annotation-1.3-spec")),
    *sorted(JARS.glob("netty-*.jar")),
]
GENERATORS = ("protoc", "grpc_java_plugin", "grpc_php_plugin", "grpc_ruby_plugin")

# Clients in other languages present certificates, and no tokens.
_CLIENT_IS_OPERATOR = {"PERSEUS_COORDINATOR_CERTIFICATE_SCOPES": '{"client": "operator"}'}


class CoordinatorProcess(Coordinator):
    """A coordinator on its own port, started on entering the context.

    It requires mutual TLS, unless its client doesn't support it: then it uses plaintext. By default it has a
    database of its own.
    """

    def __init__(
        self, folder: Path, *, has_tls: bool = True, database: str | None = None, slot_count: int = 1
    ) -> None:
        self.security = Security(folder / "security") if has_tls else None
        super().__init__(
            folder,
            database or folder / "perseus.db",
            f"--slots={slot_count}",
            environment={**self.security.of_coordinator(), **_CLIENT_IS_OPERATOR} if self.security else None,
            address=f"127.0.0.1:{free_port()}",
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> str:
        """Start it, and wait until it listens."""
        self.address = super().start().replace("127.0.0.1", "localhost")  # Node.js warns of TLS to an address
        return self.address

    def command(self) -> list[str]:
        """Return the command."""
        return [each.replace("localhost", "127.0.0.1") for each in super().command()]

    @property
    def channels(self) -> Channels:
        """The way to the coordinator."""
        return self.security.channels(self.address) if self.security else Channels(self.address)

    @property
    def of_client(self) -> Mapping[str, str]:
        """A client's environment variables for certificates."""
        return self.security.of_operator() if self.security else {}

    @contextmanager
    def jobs(self) -> Iterator[JobServiceStub]:
        """Connect to its job service."""
        with self.channels.open_blocking() as channel:
            yield JobServiceStub(channel)


class Client(Process):
    """A client, started on entering the context, whose output can be read while it runs."""

    def __enter__(self) -> Self:
        self.launch()
        return self

    @property
    def text(self) -> str:
        """The output so far."""
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text; ClusterError if it ends before."""
        self.until(lambda: text in self.text, f"{text!r} in\n{self.text}")

    def output(self) -> str:
        """Wait until it ends successfully, and return its output."""
        assert self.wait() == 0, self.text
        return self.text


def check_story(coordinator: CoordinatorProcess, job_id: str) -> list[event_pb2.JobEvent]:
    """Check the coordinator's final state of a job after a client's whole scenario.

    Returns its events.
    """
    with coordinator.jobs() as jobs:
        job = jobs.GetJob(job_service_pb2.GetJobRequest(job_id=job_id)).job
        request = job_service_pb2.ListJobEventsRequest(job_id=job_id, page_size=1000)
        events = list(jobs.ListJobEvents(request).events)
    assert job.state == job_pb2.JOB_STATE_FINISHED
    assert job.run_number == 1
    assert job.rank_counts.finished_count == 4
    clocks = [event.pipeline_clocks for event in events if event.HasField("pipeline_clocks")]
    planned = {each.pipeline for each in clocks if each.HasField("plan")}
    assert planned == {0, 1}
    assert any(each.HasField("hold") for each in clocks)
    reported = [event.straggler_reported for event in events if event.HasField("straggler_reported")]
    assert [(each.pipeline, each.slowdown_factor) for each in reported] == [(1, 1.25)]
    assert sum(event.HasField("straggler_cleared") for event in events) == 1
    return events


@dataclass(frozen=True)
class Language:
    """How the client in a language is run, and what it prints in any scenario."""

    program: Sequence[str]
    arguments: Sequence[str]
    prints: Sequence[str]
    has_tls: bool

    def coordinator(self, folder: Path) -> CoordinatorProcess:
        return CoordinatorProcess(folder, has_tls=self.has_tls)

    def start(self, target: str, folder: Path, environment: Mapping[str, str] | None = None) -> Client:
        given = {"PERSEUS_JOB": "story", "PERSEUS_SPEED": SPEED, **(environment or {})}
        arguments = (target, *self.arguments)
        log = folder / "client.log"
        return Client(log, *arguments, environment=given, program=self.program, folder=EXAMPLE)


@pytest.fixture(scope="module")
def nodejs() -> Language:
    if shutil.which("node") is None or not (EXAMPLE / "node_modules").exists():
        pytest.skip("Node.js or the example's packages are not installed; `make test-languages` has them")
    events = ("event STRAGGLER_REPORTED [stragglerReported]", "event PLAN_IN_FORCE [pipelineClocks]")
    return Language(("node", "main.js"), (), ("report PLANNED", *events), has_tls=True)


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Language:
    """Compile the client. It uses plaintext: Debian's netty lacks ALPN, which gRPC needs for TLS."""
    if not all(map(shutil.which, ("java", "javac", *GENERATORS))) or not all(
        jar.exists() for jar in CLASSPATH
    ):
        pytest.skip("Java or gRPC for it is not installed here; `make test-languages` installs it")
    folder = tmp_path_factory.mktemp("java")
    classes = folder / "classes"
    classes.mkdir()
    generate(ROOT / "protos", folder / "perseus")
    standard = folder / "standard.binpb"
    standard.write_bytes(standard_services())
    generate(standard, folder / "standard")
    generate(SOURCES / "rpc", folder / "rpc")
    sources = [str(path) for path in (*folder.rglob("*.java"), *SOURCES.glob("*.java"))]
    path = ":".join(map(str, CLASSPATH))
    subprocess.run(["javac", "-nowarn", "-d", str(classes), "-cp", path, *sources], check=True)
    program = ("java", "-cp", f"{classes}:{path}", "Client")
    return Language(program, ("story", SPEED), ("job JOB_STATE_FINISHED",), has_tls=False)


def generate(what: Path, folder: Path) -> None:
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "generate", what, f"--output={folder}"], cwd=ROOT, check=True)


def standard_services() -> bytes:
    """Return health and reflection as descriptors: no Debian package has their Java classes."""
    files = FileDescriptorSet()
    for module in (health_pb2, reflection_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    reflection = files.file[1].options
    reflection.java_package, reflection.java_multiple_files = "io.grpc.reflection.v1alpha", True
    return files.SerializeToString()


@pytest.fixture(params=["nodejs", "java"])
def language(request: pytest.FixtureRequest) -> Language:
    chosen: Language = request.getfixturevalue(request.param)
    return chosen


def test_the_whole_scenario(language: Language, tmp_path: Path) -> None:
    with (
        language.coordinator(tmp_path) as coordinator,
        language.start(coordinator.address, tmp_path, coordinator.of_client) as client,
    ):
        printed = client.output()
        events = check_story(coordinator, "story")
    assert "serving: SERVING" in printed
    assert "perseus.v1.AgentService" in printed.split("services: ")[1].splitlines()[0]
    assert [text for text in language.prints if text not in printed] == []
    if not language.has_tls:
        refused = [event.plan_refused for event in events if event.HasField("plan_refused")]
        assert refused, "the client in Java answers its first offer too late"
        assert refused[0].iteration >= refused[0].start_iteration


async def test_unknown_fields_and_messages_are_ignored(language: Language, tmp_path: Path) -> None:
    with language.coordinator(tmp_path) as coordinator:
        async with newer_ends(coordinator.channels) as address:
            with language.start(address, tmp_path) as client:
                printed = await asyncio.to_thread(client.output)
        check_story(coordinator, "story")
    assert printed.count("refused an unknown message") == 1
    assert printed.count("message refused: UNKNOWN_MESSAGE") == 1
    assert "stream ended" not in printed


@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_a_job_is_followed_to_the_coordinator_of_its_slot(language: Language, tmp_path: Path) -> None:
    with ExitStack() as stack:
        database = stack.enter_context(postgresql.running()).new_database()
        coordinators = []
        for slot in range(2):  # the first takes the first
            (tmp_path / str(slot)).mkdir()
            made = CoordinatorProcess(tmp_path / str(slot), has_tls=False, database=database, slot_count=2)
            coordinators.append(stack.enter_context(made))
        own = slot_of("story", 2)
        with language.start(coordinators[1 - own].address, tmp_path) as client:
            client.wait_for("planned: ")
            assert "SERVED_ELSEWHERE" not in client.text, "the registration was followed already"
            coordinators[own].kill()  # a rank is then announced, and refused, where the other slot is served
            coordinators[own].start()
            printed = client.output()
            check_story(coordinators[own], "story")
    assert "rank refused: SERVED_ELSEWHERE" in printed
    assert language.prints[0] in printed


def test_a_coordinator_is_killed_and_restarted(nodejs: Language, tmp_path: Path) -> None:
    with (
        nodejs.coordinator(tmp_path) as coordinator,
        nodejs.start(coordinator.address, tmp_path, coordinator.of_client) as client,
    ):
        client.wait_for("→ planned: ")  # the plans are offered, but not yet in force
        coordinator.kill()
        coordinator.start()
        printed = client.output()
        check_story(coordinator, "story")
    assert "stream ended: 14" in printed
    assert printed.count("connected: ") == 2


@pytest.mark.usefixtures("nodejs")
def test_the_rules_of_offers() -> None:
    subprocess.run(["node", "--test"], cwd=EXAMPLE, check=True)


@pytest.mark.usefixtures("nodejs")
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
        log, environment = tmp_path / "client.log", coordinator.of_client
        with Client(log, environment=environment, program=command, folder=EXAMPLE) as client:
            assert client.output().split() == ["JOB_NOT_FOUND"]


# The beginning of a file of each language, and two files that must exist.
NAMES = {
    "java": (r"^package perseus\.v1;$", ["perseus/v1/JobServiceGrpc.java", "perseus/v1/TelemetryBatch.java"]),
    "csharp": (r"^namespace Perseus\.V1 ", ["Perseus/V1/JobService.cs", "Perseus/V1/AgentService.cs"]),
    "php": (
        r"^namespace (Perseus\\V1|GPBMetadata)",
        ["Perseus/V1/JobServiceClient.php", "Perseus/V1/Job.php"],
    ),
    "ruby": (r"^module Perseus$", ["perseus/v1/job_service_services_pb.rb", "perseus/v1/job_pb.rb"]),
}


@pytest.mark.skipif(
    not all(map(shutil.which, GENERATORS)),
    reason="protoc and its plugins are not installed here; `make test-languages` installs them",
)
def test_stubs_have_their_languages_names(tmp_path: Path) -> None:
    generate(ROOT, tmp_path)
    folder = tmp_path / "build" / "languages"
    assert {path.name for path in folder.iterdir()} == NAMES.keys()
    for language, (opening, files) in NAMES.items():
        made = [path for path in (folder / language).rglob("*") if path.is_file()]
        assert {str(path.relative_to(folder / language)) for path in made} >= set(files)
        unnamed = [
            path.name
            for path in made
            if not re.search(opening, path.read_text(errors="replace"), re.MULTILINE)
        ]
        assert unnamed == []
