"""The common generators accept the contract, and their output has the names of docs/protocol.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
COMMANDS = ("protoc", "grpc_java_plugin", "grpc_php_plugin", "grpc_ruby_plugin")


@pytest.mark.slow("generates stubs in five languages")
@pytest.mark.skipif(
    not all(map(shutil.which, COMMANDS)),
    reason="protoc and its plugins are not installed here; `make test-languages` installs them",
)
def test_stubs_have_their_languages_names(tmp_path: Path) -> None:
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "generate", f"--output={tmp_path}"], cwd=ROOT, check=True)
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
