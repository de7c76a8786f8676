"""The table of docs/frameworks.md has its tests' measurements."""

import json
from pathlib import Path

import pytest

from tests.frameworks.case_table import RESULTS, RESULTS_VARIABLE, CaseResult, PageError, filled, table

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
CASE = CaseResult(
    "one",
    1,
    "One case",
    "2 × 2",
    1.0,
    1.01,
    200.0,
    180.0,
    15,
    losses_are_equal=True,
    packages=("pytest",),
    energy_errors_percent=(-0.12, 0.3),
)


def test_the_page_has_the_measured_table() -> None:
    assert PAGE.read_text() == filled(PAGE.read_text(), RESULTS)


def test_every_published_case_has_equal_losses_and_no_slowdown() -> None:
    cases = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    assert cases
    for case in cases:
        assert case["losses_are_equal"], case["name"]
        allowed = 1.02 * (1 + case["budget_percent"] / 100)
        assert case["time_s"] <= allowed * case["base_time_s"], case["name"]
        assert case["energy_j"] < case["base_energy_j"], case["name"]


def test_predicted_energies_are_within_half_a_percent_of_the_measured_ones() -> None:
    cases = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    errors_percent = {case["name"]: case.get("energy_errors_percent") for case in cases}
    assert [name for name, errors in errors_percent.items() if errors and max(map(abs, errors)) > 0.5] == []


def test_a_case_is_a_line_and_the_later_result_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path))
    CaseResult("one", 1, "Old", "1", 9.0, 9.0, 9.0, 9.0, 1, losses_are_equal=False).keep()
    CASE.keep()
    (line,) = [line for line in table(tmp_path).splitlines() if "2 × 2" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    figures = ["1.000 s", "1.010 s (+1.0 %)", "-10.0 %", "-0.1 %, +0.3 %", "equal"]
    assert cells[:-1] == ["One case", "2 × 2", *figures]
    assert cells[-1] == f"pytest {pytest.__version__}"
    assert "Old" not in table(tmp_path)


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESULTS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    CASE.keep()
    assert list(tmp_path.rglob("*")) == []


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(PageError, match=r"expected .* once, found 0 and 0"):
        filled("# Page\n", RESULTS)
