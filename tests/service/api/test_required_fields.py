"""A part whose comment in the contract begins with "Required" is refused if it is absent, and no other is."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from grpc_tools import protoc

from perseus.v1 import computation_pb2, rank_pb2, token_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, Hello
from tests.service.api.test_bounds_of_requests import asked, output, spec
from tests.service.grpc_fakes import (
    ALL_PLACES,
    METHODS,
    Client,
    FakeAgent,
    connected,
    joined,
    make_request,
    make_settings,
    outcome,
    sent,
)

PROTOS = Path(__file__).parents[3] / "protos"
_FIELD, _ONEOF = DescriptorProto.FIELD_FIELD_NUMBER, DescriptorProto.ONEOF_DECL_FIELD_NUMBER

NAMED_BY_PLACE = {
    "Schedule.order",
    "Label.key",
    "StageOrder.computations",
    "Path.steps",
    "PipelineProblem.profiles",
    "ComputationProfile.measurements",
    "GraphProblem.profiles",
    "GraphProfile.measurements",
    "GraphNode.profile",
    "GraphEdge.earlier",
    "GraphEdge.later",
}
"""Refusals give the place of these (a schedule, a stage, a kind, the labels, a node) instead of the field."""

OF_JOBS = ("FinishJob", "DeleteJob", "ResumeJob", "GetFrontier")

M = TypeVar("M", bound=Message)

Parts = dict[str, str]
"""When the comment of "Message.part" says that it is required: "always", "sometimes" or "" for never."""


def marked(directory: Path) -> Parts:
    """Read the contract's comments."""
    path = directory / "contract.binpb"
    files = [each.relative_to(PROTOS).as_posix() for each in sorted(PROTOS.rglob("*.proto"))]
    well_known = Path(protoc.__file__).parent / "_proto"
    options = [f"--proto_path={PROTOS}", f"--proto_path={well_known}", f"--descriptor_set_out={path}"]
    assert protoc.main(["protoc", *options, "--include_source_info", *files]) == 0
    found: Parts = {}
    for file in FileDescriptorSet.FromString(path.read_bytes()).file:
        for location in file.source_code_info.location:
            match list(location.path):
                case [4, number, kind, part] if kind in (_FIELD, _ONEOF):
                    message = file.message_type[number]
                    name = (message.field if kind == _FIELD else message.oneof_decl)[part].name
                    comment = location.leading_comments.strip()
                    found[f"{message.name}.{name}"] = (
                        "always"
                        if comment.startswith("Required. ")
                        else "sometimes"
                        if comment.startswith("Required ")
                        else ""
                    )
    return found


def lacking(message: M) -> Iterator[tuple[str, M]]:
    """Yield a message without each of its parts in turn, and the part as "Message.part"."""
    for field, value in message.ListFields():
        without = type(message)()
        without.CopyFrom(message)
        without.ClearField(field.name)
        oneof = field.containing_oneof
        part = field if oneof is None or oneof.name == f"_{field.name}" else oneof
        yield f"{message.DESCRIPTOR.name}.{part.name}", without
        if field.message_type is None or field.message_type.file.package != "perseus.v1":
            continue
        for name, inner in lacking(value[0] if field.is_repeated else value):
            without = type(message)()
            without.CopyFrom(message)
            place = getattr(without, field.name)
            (place[0] if field.is_repeated else place).CopyFrom(inner)
            yield name, without


class Findings:
    """What comes of messages that lack a part, against what the comments say."""

    def __init__(self, marks: Parts) -> None:
        self.marks = marks
        self.refused: set[str] = set()
        self.wrong: list[str] = []

    def add(self, part: str, named: str) -> None:
        """Take an answer: the names in a refusal; "" if there was none."""
        mark = self.marks[part]
        if named:
            self.refused.add(part)
        if named and not mark:
            self.wrong.append(f"{part} is refused ({named}), and not marked as required")
        elif not named and mark == "always":
            self.wrong.append(f"{part} is marked as required, and not refused")
        is_named = part in NAMED_BY_PLACE or part.split(".")[1] in re.findall(r"\w+", named)
        if named and mark == "always" and not is_named:
            self.wrong.append(f"{part} is refused as {named}")

    def untried(self, names: set[str]) -> set[str]:
        """Return what is marked as required in these messages, and was never refused."""
        marked_parts = {part for part, mark in self.marks.items() if mark and part.split(".")[0] in names}
        return marked_parts - self.refused


async def test_an_agents_messages_lack_nothing_that_is_required(client: Client, tmp_path: Path) -> None:
    findings = Findings(marked(tmp_path))
    agent = await joined(client)
    for index in range(len(said(agent))):
        parts = [part for part, _ in lacking(said(agent)[index])]
        assert await named(agent, said(agent)[index]) == "", "a valid message"
        for position, part in enumerate(parts):
            _, message = [*lacking(said(agent)[index])][position]  # its iteration is new each time
            findings.add(part, await named(agent, message))
    hello = Hello(instance_id="other", agent_version="0", hostname="host", protocol_version=1)
    for part, greeting in lacking(hello):
        call = client.agents.Connect()
        await call.write(ConnectRequest(hello=greeting))
        findings.add(part, await lacks(call))
    assert findings.wrong == []
    own = {each.name for each in messages(ConnectRequest.DESCRIPTOR)}
    assert findings.untried(own) == set()


async def test_requests_lack_nothing_that_is_required(tmp_path: Path) -> None:
    findings = Findings(marked(tmp_path))
    feeds = {"default": {"hosts": ["*"], "reference_w": 6000.0}}
    method_of = {method.input_type.name: name for name, method in METHODS.items() if name != "Connect"}
    async with connected(make_settings(tmp_path, feeds=feeds)) as client:
        await client.register()
        seen = set()
        for base in requests():
            kind = base.DESCRIPTOR.name
            for number, (part, message) in enumerate(lacking(base)):
                if (kind, part) in seen and findings.marks[part] != "sometimes":
                    continue
                seen.add((kind, part))
                if getattr(message, "request_id", ""):  # a repeated one would be answered as before
                    message.request_id = f"{len(seen)}-{number}"  # type: ignore[attr-defined]
                findings.add(part, await lacks(client.ask(method_of[kind], message)))
    assert findings.wrong == []
    own = {each.name for base in requests() for each in messages(base.DESCRIPTOR)}
    empty = {"GetInfoRequest", "ListCoordinatorsRequest", "ListFeedsRequest", "ListTokensRequest"}
    assert method_of.keys() - own == empty
    assert findings.untried(own) == set()


def messages(descriptor: Any) -> Iterator[Any]:
    """Yield a message's type and those of its parts."""
    yield descriptor
    for field in descriptor.fields:
        if field.message_type is not None and field.name != "bundle":  # its messages also come alone
            yield from messages(field.message_type)


def said(agent: FakeAgent) -> list[ConnectRequest]:
    """Valid messages of an agent, of every kind but Hello, and Heartbeat, which requires nothing."""
    reason = rank_pb2.PLAN_REFUSAL_REASON_PAST_START
    about = {"job_id": "job", "rank": agent.place(ALL_PLACES[0]), "epoch": "e", "version": 1}
    found = [each for each in output(agent) if not each.HasField("heartbeat")]
    found.append(sent(plan_answer=about | {"message": "m", "iteration": 0}))
    found.append(sent(plan_in_force=about | {"iteration": 1}))
    for each in found:
        if each.HasField("plan_answer"):
            each.plan_answer.refusal_reason = reason  # which a refusal must have
    return found


async def named(agent: FakeAgent, message: ConnectRequest) -> str:
    """Send a message; return the names in its refusal."""
    agent.clear_refusals()
    await agent.send(message)
    await agent.beat()
    if agent.refused:
        metadata = agent.refused[0].metadata
        return " ".join([*metadata, metadata["field"]])
    return str(agent.refusals[0].field) if agent.refusals else ""


def requests() -> list[Message]:
    """Valid requests of every method."""
    interleaved = computation_pb2.SCHEDULE_NAME_INTERLEAVED_ONE_FORWARD_ONE_BACKWARD
    schedule = {"named": {"name": interleaved, "microbatch_count": 1, "chunk_count": 2}}
    agent = token_service_pb2.SCOPE_AGENT
    return [
        *asked(),
        make_request(
            "RegisterJob",
            spec=spec(schedule=schedule, stage_work=[{"fingerprint": "w"}]),
            request_id="r",
            spec_fingerprint="f",
            owner="o",
            labels=[{"key": "k", "value": "v"}],
        ),
        *(make_request(name, job_id="job") for name in OF_JOBS),
        make_request("MeasureBaseline", job_id="job", request_id="r"),
        make_request("ListLedgerEntries", job_id="job", page_size=1),
        make_request("CancelBudget", budget_id="b"),
        make_request("WatchFeeds", feed="default"),
        make_request("CreateToken", name="t", scope=agent, job_patterns=["*"], host_patterns=["*"]),
        make_request("RevokeToken", name="t"),
    ]


async def lacks(call: Any) -> str:
    """The names in the refusal of a call; "" if it lacks nothing."""
    reason, metadata = await outcome(call)
    is_named = reason.startswith("INVALID_") or reason.endswith("_NOT_FOUND")
    return " ".join([*metadata, metadata.get("field", "")]) if is_named else ""
