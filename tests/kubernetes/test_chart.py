"""The Helm chart: linted, rendered, held against Kubernetes' schemas, and what it would run, as processes.

No cluster is in play: what needs one (scheduling, volumes, policies in force) is not shown here.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from perseus import configuration
from perseus.agent.sidecar.settings import AgentSettings
from perseus.demo.processes import Process
from perseus.demo.security import Security
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.service.settings import CoordinatorSettings
from tests.ports import free_port

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs `make test-kubernetes`")
yaml = pytest.importorskip("yaml", reason="needs `make test-kubernetes`")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "perseus"
_OURS = Path(sys.executable).parent / "helm"
HELM = str(_OURS) if _OURS.exists() else shutil.which("helm")
KUBERNETES = ("1.27", "1.31", "1.35")

pytestmark = [
    pytest.mark.slow("renders the chart in processes of helm's"),
    pytest.mark.skipif(HELM is None, reason="needs helm: `make test-kubernetes`"),
    pytest.mark.timeout(240),
]

Values = Mapping[str, Any]
Object = dict[str, Any]

PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}}}
MUTUAL = {"mutual": True, "probeSecret": "perseus-probe-tls"}
CASES: Mapping[str, Values] = {
    "defaults": {},
    "mutual TLS": {"coordinator": {"tls": MUTUAL}, "agent": {"tls": {"mutual": True}}},
    "agents of a coordinator elsewhere": {
        "coordinator": {"enabled": False},
        "agent": {"coordinator": "perseus.example:50051", "hostPaths": {"grants": "/etc/perseus/grants"}},
    },
    "a fleet": {
        "coordinator": {"replicas": 3, "databaseSecret": "perseus-database", "settings": {"slots": 2}}
    },
    "a coordinator alone": {"agent": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "everything": {
        "imagePullSecrets": [{"name": "registry"}],
        "coordinator": {
            "databaseSecret": "perseus-database",
            "tls": MUTUAL,
            "settings": {"lease_s": 60, "feeds": {"hall": {"hosts": ["gpu-*"], "limit_w": 100000}}},
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "volume": {"size": "20Gi", "storageClass": "fast"},
            "podDisruptionBudget": {"maxUnavailable": 0},
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
        "agent": {"runtimeClassName": "", "nodeSelector": {}, "tolerations": []},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"grpcFrom": [PEER], "httpFrom": [PEER], "coordinatorEgress": [{"to": [PEER]}]},
    },
}


def helm(*arguments: str, values: Values) -> "subprocess.CompletedProcess[str]":
    assert HELM is not None
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60
    )


def rendered(values: Values) -> list[Object]:
    done = helm("template", "test", str(CHART), "--namespace", "perseus", values=values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def only(objects: list[Object], kind: str, part: str) -> Object:
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == f"test-perseus-{part}")
    return found


def workloads(objects: list[Object]) -> list[Object]:
    return [each for each in objects if each["kind"] in ("StatefulSet", "DaemonSet")]


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def values(request: pytest.FixtureRequest) -> Values:
    found: Values = request.param
    return found


# --- What it renders ----------------------------------------------------------------------------------------


def test_it_is_linted(values: Values) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_of_kubernetes(values: Values, version: str) -> None:
    found = rendered(values)
    own = [each for each in found if each["kind"] != "ServiceMonitor"]  # of Prometheus' operator
    assert own
    for each in own:
        kubernetes_validate.validate(each, version, strict=True)


def test_what_belongs_together_finds_each_other(values: Values) -> None:
    found = rendered(values)
    assert workloads(found)
    for workload in workloads(found):
        template = workload["spec"]["template"]
        labels, pod = template["metadata"]["labels"], template["spec"]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {volume["name"] for volume in pod["volumes"]} | set(claims)
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        part = labels["app.kubernetes.io/component"]
        for kind in ("NetworkPolicy", "PodDisruptionBudget", "Service"):
            for each in found:
                if each["kind"] == kind and each["metadata"]["name"] == workload["metadata"]["name"]:
                    spec = each["spec"]
                    selector = spec.get("podSelector") or spec["selector"]
                    assert selector.get("matchLabels", selector) == labels, (kind, part)


def test_settings_are_settings(values: Values, tmp_path: Path) -> None:
    for workload in workloads(found := rendered(values)):
        part = workload["metadata"]["name"].rpartition("-")[2]
        file = tmp_path / f"{part}.toml"
        file.write_text(only(found, "ConfigMap", part)["data"][file.name])
        if part == "coordinator":
            of_fleet = {"database": "postgresql://perseus@db/perseus"} if values is CASES["a fleet"] else {}
            coordinator = configuration.load(CoordinatorSettings, file, of_fleet)
            assert coordinator.lease_s == values.get("coordinator", {}).get("settings", {}).get("lease_s", 30)
            is_elsewhere = "databaseSecret" in values.get("coordinator", {})
            assert (str(coordinator.database) == "/var/lib/perseus/jobs.db") is not is_elsewhere
        else:
            agent = configuration.load(AgentSettings, file, {})
            asked = values.get("agent", {}).get("coordinator")
            if values is not CASES["a fleet"]:
                assert agent.coordinator == (asked or "test-perseus-coordinator.perseus.svc:50051")


def test_agents_of_a_fleet_know_every_coordinator_by_the_address_that_it_advertises() -> None:
    found = rendered(CASES["a fleet"])
    numbers = range(3)
    services = {
        each["metadata"]["name"]: each["spec"]["selector"]["statefulset.kubernetes.io/pod-name"]
        for each in found
        if each["kind"] == "Service" and "statefulset.kubernetes.io/pod-name" in each["spec"]["selector"]
    }
    names = [f"test-perseus-coordinator-{number}" for number in numbers]
    assert services == {name: name for name in names}
    (container,) = only(found, "StatefulSet", "coordinator")["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["PERSEUS_COORDINATOR_ADVERTISE"] == "$(POD_NAME).perseus.svc:50051"
    settings = only(found, "ConfigMap", "agent")["data"]["agent.toml"]
    addresses = ",".join(f"{name}.perseus.svc:50051" for name in names)
    assert f'coordinator = "{addresses}"' in settings


def test_pods_start_anew_with_other_settings_only() -> None:
    def checksum(settings: Values) -> str:
        template = only(rendered({"agent": {"settings": settings}}), "DaemonSet", "agent")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/settings"]
        return found

    assert checksum({}) == checksum({})
    assert checksum({}) != checksum({"observe": True})


def test_an_agent_has_the_capabilities_that_are_explained() -> None:
    context = only(rendered({}), "DaemonSet", "agent")["spec"]["template"]["spec"]["containers"][0]
    added = context["securityContext"]["capabilities"]["add"]
    page = (ROOT / "docs" / "security.md").read_text()
    unit = (ROOT / "deploy" / "perseus-agent.service").read_text()
    assert f"add: [{', '.join(added)}]" in page
    assert {f"CAP_{name}" for name in added} == set(re.findall(r"CAP_[A-Z_]+", unit))


def test_the_monitor_scrapes_what_the_service_has() -> None:
    found = rendered(CASES["everything"])
    monitor, service = (only(found, kind, "coordinator") for kind in ("ServiceMonitor", "Service"))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"coordinater": {}}, "coordinater"),
        ({"coordinator": {"tls": {"mutual": True}}}, "probeSecret"),
        ({"coordinator": {"podDisruptionBudget": {"maxUnavailable": 2}}}, "maxUnavailable"),
        ({"coordinator": {"settings": {"leese_s": 60}}}, "leese_s"),
        ({"coordinator": {"replicas": 2}}, "databaseSecret"),
        ({"coordinator": {"settings": {"feeds": {"hall": {"limit": 5}}}}}, "limit"),
        ({"agent": {"settings": {"obsreve": True}}}, "obsreve"),
        ({"agent": {"socketMode": "rw"}}, "socketMode"),
        ({"agent": {"hostPaths": {"records": "var/lib"}}}, "records"),
    ],
)
def test_values_that_can_not_be_are_named(wrong: Values, message: str) -> None:
    done = helm("template", "test", str(CHART), values=wrong)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("part", ["coordinator", "agent"])
def test_images_are_made_of_what_is_installed_elsewhere(part: str) -> None:
    file = ROOT / "deploy" / "containers" / f"{part}.Containerfile"
    (extras,) = re.findall(r"whl\)\[([a-z,]+)\]", file.read_text())
    assert re.search(
        rf"^{part}\) extras={extras} ;;$", (ROOT / "deploy" / "install").read_text(), re.MULTILINE
    )
    linted = subprocess.run(
        [Path(sys.executable).parent / "hadolint", file],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (linted.returncode, linted.stdout) == (0, "")


# --- What it runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Container:
    """A container of the chart's, as processes of this machine: its paths are in a folder, its port free."""

    command: list[str]
    probes: list[list[str]]
    environment: dict[str, str]


def container(workload: Object, change: Callable[[str], str]) -> Container:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    part = found["name"]
    text = (ROOT / "deploy" / "containers" / f"{part}.Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    probes = [p["exec"]["command"] for name, p in found.items() if name.endswith("Probe") and "exec" in p]
    run = [[change(word) for word in words] for words in ([*json.loads(entry), *found["args"]], *probes)]
    ours = [[sys.executable, "-m", "perseus.cli", *words[1:]] for words in run]
    assert {words[0] for words in run} == {"/opt/perseus/bin/perseus"}
    environment = {each["name"]: change(each["value"]) for each in found["env"]}
    return Container(ours[0], ours[1:], {"PATH": "/usr/bin:/bin", **environment})


@contextmanager
def started(found: Container, event: str, log: Path) -> Iterator[None]:
    """A container's process from the event in its log on to its end, which has to be a clean one."""
    with Process(log, program=found.command, environment=found.environment, folder=ROOT) as process:
        process.launch()
        process.logged(event)
        yield
        assert process.terminate() == 0


def probe(found: Container) -> list[int]:
    """The exit codes of its probes."""
    return [
        subprocess.run(
            words, env=found.environment, cwd=ROOT, check=False, timeout=30, capture_output=True
        ).returncode
        for words in found.probes
    ]


@pytest.mark.slow("starts a coordinator and an agent by the chart's commands")
@pytest.mark.parametrize("is_mutual", [False, True], ids=["TLS", "mutual TLS"])
def test_its_commands_and_probes_do_what_they_are_for(tmp_path: Path, is_mutual: bool) -> None:
    port, http_port = free_port(), free_port()
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    EmulatedGpu.create(gpus / "gpu0", A100_SXM.with_clocks(4), "GPU-0").close()
    found = rendered(
        {
            "coordinator": {
                "tls": MUTUAL if is_mutual else {},
                "settings": {"listen": f"127.0.0.1:{port}", "http": f"127.0.0.1:{http_port}"},
            },
            "agent": {
                "tls": {"mutual": is_mutual},
                "coordinator": f"localhost:{port}",
                "settings": {"gpu_backend": "emulated", "emulated_gpus": str(gpus)},
            },
        }
    )
    security = Security(tmp_path / "security")
    coordinator, agent = (mounted(found, part, security, tmp_path, port) for part in ("coordinator", "agent"))
    assert [*probe(coordinator), *probe(agent)] == [1, 1, 1, 1], "nobody is there"
    with started(coordinator, "listening", tmp_path / "coordinator.log"):
        assert probe(coordinator) == [0, 0]
        allow_agents(security, tmp_path, port)
        with started(agent, "connected", tmp_path / "agent.log"):
            assert probe(agent) == [0, 0]
        nobody = {name: value for name, value in coordinator.environment.items() if "_TLS_" not in name}
        assert probe(replace(coordinator, environment=nobody)) != [0, 0]


def mounted(found: list[Object], part: str, security: Security, folder: Path, port: int) -> Container:
    """A part's container, with its config map and secrets where it looks for them."""
    places = {
        "/etc/perseus": str(folder / part / "etc"),
        "/var/lib/perseus": str(folder / part / "lib"),
        "/run/perseus": str(folder / part / "run"),
        "localhost:50051": f"localhost:{port}",
    }

    def change(text: str) -> str:
        for inside, outside in places.items():
            text = text.replace(inside, outside)
        return text

    etc = folder / part / "etc"
    is_coordinator = part == "coordinator"
    own = (security.coordinator_certificate, security.coordinator_key)
    client = (security.client_certificate, security.client_key)
    for name, (certificate, key) in {"tls": own if is_coordinator else client, "probe": client}.items():
        (etc / name).mkdir(parents=True)
        (etc / name / "tls.crt").write_bytes(certificate.read_bytes())
        (etc / name / "tls.key").write_bytes(key.read_bytes())
        (etc / name / "ca.crt").write_bytes(security.ca.read_bytes())
    (etc / "token").mkdir()
    (folder / part / "lib").mkdir()
    (etc / f"{part}.toml").write_text(change(only(found, "ConfigMap", part)["data"][f"{part}.toml"]))
    return container(only(found, "StatefulSet" if is_coordinator else "DaemonSet", part), change)


def allow_agents(security: Security, folder: Path, port: int) -> None:
    """Make the agents' token, as the chart's notes say, and put it into their secret."""
    made = folder / "coordinator" / "lib" / "operator.token"
    security.token_file.write_text(made.read_text())
    security.admit_agents(f"localhost:{port}")
    (folder / "agent" / "etc" / "token" / "token").write_text(security.agent_token_file.read_text())
