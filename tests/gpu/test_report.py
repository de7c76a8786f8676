from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pynvml
import pytest

from tests.gpu.check import NothingToCheckError, driver_or_why_not, main
from tests.gpu.needs import needs
from tests.gpu.report import Finding, Report, append, judged

REPOSITORY = Path(__file__).parents[2]


def report(*findings: Finding) -> Report:
    return Report("NVIDIA Q1", "555.1", "torch 9.9", "2026-11-21", findings)


GOOD = judged("energy", "1 J", "within 3 %", True)
BAD = judged("edges", "70 µs | late", "below 50 µs", False)
REPORTED = Finding("resolution", "1 mJ")


def test_a_report_passes_if_nothing_has_failed() -> None:
    assert report(GOOD, REPORTED).has_passed
    assert not report(GOOD, BAD).has_passed


def test_reports_are_put_at_the_end_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpus.md"
    page.write_text("# GPUs\n\nText.\n\n")
    append(page, report(GOOD, BAD))
    append(page, report(REPORTED))
    assert page.read_text() == (
        "# GPUs\n\nText.\n\n"
        "### NVIDIA Q1, driver 555.1\n\n2026-11-21, torch 9.9, by `make test-gpu`.\n\n"
        "| check | found | expected | |\n|---|---|---|---|\n"
        "| energy | 1 J | within 3 % | passed |\n| edges | 70 µs \\| late | below 50 µs | FAILED |\n\n"
        "### NVIDIA Q1, driver 555.1\n\n2026-11-21, torch 9.9, by `make test-gpu`.\n\n"
        "| check | found | expected | |\n|---|---|---|---|\n| resolution | 1 mJ |  |  |\n"
    )
    assert list(tmp_path.iterdir()) == [page]


def test_the_page_ends_where_reports_go() -> None:
    text = (REPOSITORY / "benchmarks" / "results" / "gpus.md").read_text()
    assert text.rindex("\n## ") == text.index("\n## Results")


def test_where_there_is_nothing_to_check_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpus.md"
    page.write_text("as it was")
    if find_spec("torch") is not None and import_module("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([str(page)]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(("test-gpu: expected PyTorch with CUDA in ", "test-gpu: expected an NVIDIA GPU, "))
    assert not output.out
    assert page.read_text() == "as it was"


def test_a_driver_that_does_not_answer_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(NothingToCheckError, match=r"expected NVML.*found: Driver Not Loaded"):
        driver_or_why_not()


def test_what_travels_is_what_the_base_install_needs_but_what_is_there() -> None:
    found = needs((REPOSITORY / "pyproject.toml").read_text())
    assert any(each.startswith("grpcio-status") for each in found)
    assert any(each.startswith("nvidia-ml-py") for each in found)
    assert not any(each.startswith(("numpy", "grpcio>")) for each in found)
