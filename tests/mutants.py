"""`make mutants`: which tests can't fail. Each of a sample of mutants runs against its part's own tests.

python -m tests.mutants REPORT [--each COUNT] [--against EARLIER] [--parts PART …]

A mutant is the product with one operator, number or condition changed (Cosmic Ray's operators). Of the part's
fast tests only those run that run the changed line, quickest first, up to 60 s of the processor. A mutant is
killed if a test fails, or takes longer. REPORT gets a line of JSON for each; an interrupted run goes on where
it stopped. With an EARLIER report the same mutants run, and those that were killed then and survive now are
listed.

It works in a copy of the checkout, on one core, for an hour or two.
"""

import argparse
import contextlib
import difflib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).parent.parent
PARTS = {
    "solver": ("perseus/solver", ["tests/solver"]),
    "planning": ("perseus/service/job/planning", ["tests/service/job"]),
    "clocks": ("perseus/agent/clocks", ["tests/agent/clocks", "tests/agent/rank"]),
    "energy": ("perseus/agent/energy", ["tests/agent/energy"]),
    "serving": ("perseus/serving", ["tests/serving"]),
}
"""The product's folder, and its own tests."""

LIMIT_S = 60
_PYTEST = ("-q", "-m", "not slow", "--hypothesis-seed=0", "-p", "no:cacheprovider")
_FORKED = ("-x", "-p", "no:xdist", "-p", "no:cov", "-W", "ignore::pytest.PytestAssertRewriteWarning")
_SHARED = ("numpy", "igraph", "hypothesis", "grpc", "structlog", "pydantic")
"""Imported once, before the forks. Nothing of the product may be."""

Mutant = dict[str, Any]


def all_mutants(part: str) -> list[Mutant]:
    """Return every mutant of a part, without types and imports."""
    mutants = []
    for path in sorted(Path(PARTS[part][0]).rglob("*.py")):
        code = path.read_text()
        lines = code.splitlines()
        for name in operator_names():
            if "BitOr" in name or "Variable" in name:
                continue  # unions of types, and operators that need arguments
            operator = get_operator(name)()
            places = [
                place for node in ast_nodes(get_ast(code)) for place in operator.mutation_positions(node)
            ]
            for occurrence, ((line, _), _) in enumerate(places):
                if not lines[line - 1].lstrip().startswith(("import ", "from ")):
                    mutants.append(
                        {
                            "part": part,
                            "path": str(path),
                            "operator": name,
                            "occurrence": occurrence,
                            "line": line,
                        }
                    )
    return mutants


def mutated(mutant: Mutant) -> str | None:
    """Return the mutant's module, or None if it is the product's; note the difference."""
    code = Path(mutant["path"]).read_text()
    new = mutate_code(code, get_operator(mutant["operator"])(), mutant["occurrence"])
    if new is None or new == code:
        return None
    changes = difflib.unified_diff(code.splitlines(), new.splitlines(), n=0, lineterm="")
    mutant["diff"] = [line for line in changes if line[0] in "+-" and line[:3] not in ("+++", "---")]
    return str(new)


def sampled(part: str, count: int) -> Iterator[Mutant]:
    """Return `count` mutants, always the same ones."""
    mutants = all_mutants(part)
    random.Random(0).shuffle(mutants)
    different = (mutant for mutant in mutants if mutated(mutant))
    for _, mutant in zip(range(count), different, strict=False):
        yield mutant


def repeated(part: str, earlier: list[Mutant]) -> Iterator[Mutant]:
    """Return the mutants of an earlier report that can still be made."""
    wanted = [each for each in earlier if each["part"] == part]
    places = {(each["path"], each["operator"]) for each in wanted}
    now = [each for each in all_mutants(part) if (each["path"], each["operator"]) in places and mutated(each)]
    for each in wanted:
        same = [mutant for mutant in now if (mutant["path"], mutant["diff"]) == (each["path"], each["diff"])]
        if same:
            yield same[0]
        else:
            print(f"{each['path']}:{each['line']}: its code has changed: {each['diff']}")


class Tests:
    """A part's fast tests: what each takes, and which lines it runs."""

    def __init__(self, part: str, folder: Path) -> None:
        product, tests = PARTS[part]
        data = folder / f"{part}.coverage"
        (rc := folder / f"{part}.rc").write_text(f"[run]\nsource={product}\ndata_file={data}\n")
        command = [sys.executable, "-m", "pytest", *_PYTEST, *tests, f"--cov={product}", f"--cov-config={rc}"]
        command += ["--cov-context=test", "--cov-report=", "--durations=0", "-vv"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        self._data = data
        self.times_s: dict[str, float] = {}
        for line in done.stdout.splitlines():
            match line.split(maxsplit=2):
                case [time_s, "setup" | "call" | "teardown", test]:
                    self.times_s[test] = self.times_s.get(test, 0.0) + float(time_s.removesuffix("s"))

    def of(self, path: str, line: int) -> list[str]:
        """Return the tests that run a line, all if it runs at import; quickest first, up to the limit."""
        query = (
            "SELECT context, numbits FROM line_bits JOIN file ON file.id = file_id"
            " JOIN context ON context.id = context_id WHERE path LIKE ?"
        )
        with sqlite3.connect(self._data) as data:
            rows = data.execute(query, [f"%/{path}"]).fetchall()
        tests = {context.rpartition("|")[0] for context, bits in rows if line in numbits_to_nums(bits)}
        running = sorted((tests - {""}) or self.times_s, key=lambda test: self.times_s.get(test, 0.0))
        total_s = 0.0
        chosen: list[str] = []
        for test in running:
            total_s += self.times_s.get(test, 0.0)
            if chosen and total_s > LIMIT_S:
                break
            chosen.append(test)
        return chosen


def outcome(tests: list[str], log: Path) -> str:
    """Run tests in a process of their own; return what became of the mutant."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for name in [each for each in sys.modules if each.partition(".")[0] in ("tests", "perseus")]:
            del sys.modules[name]  # the copy's are imported
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 70
        try:
            status = int(pytest.main([*tests, *_PYTEST, *_FORKED]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that its tests have left
    if os.WIFSIGNALED(status):
        return "too long"
    failed = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return "survived" if os.WEXITSTATUS(status) == 0 else f"killed: {failed[0] if failed else 'at import'}"


def main() -> None:
    """Run the mutants, and print how many of each part are killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--each", type=int, default=80, help="mutants of each part")
    parser.add_argument("--against", type=Path, help="an earlier report")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    options = parser.parse_args()
    report = options.report.resolve()
    earlier = _read(options.against) if options.against else []
    for name in _SHARED:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "dist", "build")
        shutil.copytree(ROOT, copy, ignore=ignored)
        if (shared := ROOT.parent / "shared").exists():
            (Path(folder) / "shared").symlink_to(shared.resolve())
        os.chdir(copy)
        sys.path[0] = str(copy)
        for part in options.parts:
            tests = Tests(part, Path(folder))
            log = Path(folder) / "log"
            unchanged = outcome(sorted(tests.times_s, key=lambda test: tests.times_s[test])[:20], log)
            assert unchanged == "survived", f"without any change: {log.read_text()}"
            done = [(each["path"], each["diff"]) for each in _read(report)]
            for mutant in repeated(part, earlier) if earlier else sampled(part, options.each):
                if (mutant["path"], mutant["diff"]) in done:
                    continue
                path, code = Path(mutant["path"]), mutated(mutant)
                product = path.read_text()
                path.write_text(str(code))
                mutant["outcome"] = outcome(tests.of(mutant["path"], mutant["line"]), log)
                path.write_text(product)
                with report.open("a") as lines:
                    lines.write(json.dumps(mutant) + "\n")
                print(f"{mutant['path']}:{mutant['line']}: {mutant['outcome']}", flush=True)
    _summarise(_read(report), earlier)


def _read(report: Path) -> list[Mutant]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def _summarise(mutants: list[Mutant], earlier: list[Mutant]) -> None:
    for part in PARTS:
        counts = Counter(each["outcome"].partition(":")[0] for each in mutants if each["part"] == part)
        print(
            f"{part}: {counts['killed']} killed, {counts['too long']} too long, {counts['survived']} survived"
        )
    killed = [(each["path"], each["diff"]) for each in earlier if each["outcome"] != "survived"]
    for each in mutants:
        if each["outcome"] == "survived" and (each["path"], each["diff"]) in killed:
            print(f"{each['path']}:{each['line']}: was killed, and survives: {each['diff']}")


if __name__ == "__main__":
    main()
