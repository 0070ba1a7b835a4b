"""Mutation testing of the core: change one expression at a time, and check whether a test fails.

    python tools/mutation.py                      all files of the core; resumes an interrupted run
    python tools/mutation.py _tree.py --jobs 4    one file or folder, four mutants in parallel
    python tools/mutation.py --report             only print the known results
    python tools/mutation.py --save               also write the table to tools/mutation.md

A mutant is a copy of the package with one changed expression, such as a comparison, an operator, a number, the branches
of a selection, or a removed check. The tests of its folder (`CORE` in `source_map.py`) that execute the changed line
run until one fails. Tests that detected other mutants of the same file or folder run first, followed by test files that
are quick or that detected many mutants. If no test fails, or none within `PATIENCE`, the mutant survives. In this case,
a test is missing, the change has no effect, or only a test that did not run detects it. In the last two cases,
`tools/mutation_explained.json` contains the reason. At the end, the program prints a table and the surviving mutants
without a reason.

``.mutation/lines.json`` contains the lines that each test executes. They are recorded once, with the unchanged package.
This also checks that all tests pass without a mutation. Delete this file after a change of the package or of a test.

``.mutation/results.json`` contains the result of each mutant, the test that detected it, and the date. The key is the
text of the line and of the change. A result remains valid until that line or a test changes; ``--afresh`` ignores all
results. Survivors without a reason run again each time, and survivors with a reason run again only with ``--afresh``.
"""

import argparse
import ast
import compileall
import copy
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from py_compile import PycInvalidationMode
from runpy import run_path

import coverage
import pytest
from source_map import CORE, OF_ALL

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / ".mutation" / "results.json"
LINES = ROOT / ".mutation" / "lines.json"
EXPLAINED = ROOT / "tools" / "mutation_explained.json"
SAVED = ROOT / "tools" / "mutation.md"
HEAD = """# Mutation testing of the core

Each mutant is a copy of the package with one changed expression. `python tools/mutation.py --save` creates the mutants,
runs the tests on each of them, and writes this page. The columns count mutants:

- killed: a test failed.
- killed in CI: the first test that failed is one that only CI runs, not the README's test command.
- timed out: the tests did not end.
- explained: no test that ran failed, for the reason in `mutation_explained.json`: the change has no effect, or a test
  that did not run detects it.
- survived: no test failed, and there is no reason.
- not run: the mutant has not been tested yet.

The column "run on" contains the date of the last run of a file, which may have tested an earlier version.
"""
CPU_SECONDS = 300  # A mutant that needs more CPU seconds probably never ends, and its result is "timed out".
HOURS = 2  # A mutant that waits is stopped after this time, for example if the machine is busy.
PATIENCE = 60  # If tests pass for this number of CPU seconds, no further file is run, and the mutant survives.
# The exit status is 1 if a test of the README's test command fails, and 2 if a test fails that only CI runs.
KILLED, KILLED_IN_CI = 1, 2
PASSED = (0, 5)  # pytest exits with 0 if all tests pass, and with 5 if there are no tests.
IN_CI = "not slow and not peers"
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "hypothesispytest", "-o", "addopts=")
FIRST = 12  # At most 12 tests that detected other mutants run before all other tests.
# Modules that are imported before the fork, because importing them takes longer than most tests.
SHARED = ("jax", "optax", "chex", "flax.nnx", "equinox", "hypothesis", "jax.experimental.sparse")
SHARED += ("flax.serialization", "jaxlib.mlir.dialects.mhlo")

# --- Creation of mutants ---

SWAPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
TWINS = {"minimum": "maximum", "min": "max", "all": "any", "floor": "ceil", "pmin": "pmax", "logical_and": "logical_or"}
TWINS |= {twin: name for name, twin in TWINS.items()}
SELECTIONS = ("where", "select")


def mutants_of(source):
    """Yield ``(line number, before, after, mutated source)`` for each mutant of a file."""
    for node in worth_breaking(ast.parse(source)):
        for broken in broken_nodes(node):
            start, end = (offset_of(source, node, which) for which in ("", "end_"))
            after = "pass" if broken is None else ast.unparse(broken)
            after = f"({after})" if isinstance(broken, ast.expr) else after
            yield node.lineno, source[start:end], after, source[:start] + after + source[end:]


def worth_breaking(node):
    """Yield all nodes that can influence the behavior. Annotations, error messages and decorators are excluded."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_typing(child) and not is_strict(child):
                yield child
                yield from worth_breaking(child)


def is_strict(node):
    """Return whether a node is the argument ``strict`` of `zip`, which only checks that lengths are equal."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def is_typing(node):
    is_alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
    of_type = (
        isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)) and "[" in ast.unparse(node)
    )
    name = ast.unparse(node.targets[0]).lstrip("_") if of_type else ""
    return is_alias or (name[:1].isupper() and not name.isupper())


def broken_nodes(node):
    """Yield the replacements of a node. None means that the statement is removed."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield changed(node, ops=[SWAPPED[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            yield changed(node, op=SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Attribute(attr=name), args=[condition, a, b]) if name in SELECTIONS:
            yield changed(node, args=[condition, b, a])
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in TWINS:
            yield changed(node, func=changed(function, attr=TWINS[name]))
        case ast.Call(func=ast.Name(id=name) as function) if name in TWINS:
            yield changed(node, func=changed(function, id=TWINS[name]))
        case ast.IfExp(test=test, body=body, orelse=orelse) if not isinstance(test, ast.Compare):
            yield ast.IfExp(test, orelse, body)
        case ast.Expr(value=ast.Call()):
            yield None


def changed(node, **fields):
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def lines_of_statements(source):
    """Map each line to the lines of its statement. For a block, these are the lines of its header."""
    found = {}
    # `ast.walk` visits outer statements first, so the lines of inner statements replace those of outer statements.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            end = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
            lines = range(node.lineno, max(node.lineno, end) + 1)
            found |= dict.fromkeys(lines, lines)
    return found


def offset_of(source, node, which):
    lines = source.splitlines(keepends=True)
    line, column = getattr(node, f"{which}lineno"), getattr(node, f"{which}col_offset")
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


# --- Execution of mutants ---


class Workplace:
    """A copy of the project in which one file at a time is mutated."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="mutation-"))
        leave_out = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        for name in ("jax_lossscale", "tests", "tools", "docs"):
            shutil.copytree(ROOT / name, self.root / name, ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        # Invalidation uses hashes, because two mutants may have the same size and modification time.
        compileall.compile_dir(self.root, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self.process = self.mutant = None

    def begin(self, mutant, noticed, running):
        """Write the mutant and fork a process that runs the tests. The fork shares modules that take long to import."""
        self.mutant, self.started = mutant, time.monotonic()
        (self.root / "noticed").write_text("")
        broken = self.root / "jax_lossscale" / mutant["file"]
        self.whole = broken.read_text()
        broken.write_text(mutant["source"])
        self.process = os.fork()
        if self.process == 0:
            self.code = KILLED
            try:
                os.setpgid(0, 0)  # Child processes are killed with the process group.
                resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.RLIM_INFINITY))
                self.enter()
                if self.all_pass(noticed, running):
                    self.code = 0
            except BaseException:
                traceback.print_exc()
            finally:  # The child must not return to the loop of the parent process.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.code)

    def enter(self):
        with open(self.root / "output", "w") as output:
            sys.stdout.flush()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))

    def all_pass(self, noticed, running):
        """Return whether all tests in ``running``, which execute the line, and all other tests of their files pass.

        The other tests are included because JAX may reuse programs that were traced by a test in ``running``.
        ``noticed`` contains the tests that detected other mutants.
        """
        self.running, self.others, self.done = running, False, set()
        # Only failed tests count here, because recorded tests may no longer exist.
        first = [test for test in dict.fromkeys(noticed) if test in running][:FIRST]
        if first and pytest.main([*OPTIONS, "-m", IN_CI, *first], plugins=[self]) == pytest.ExitCode.TESTS_FAILED:
            return False
        seconds, often = Counter(), Counter(test.partition("::")[0] for test in noticed)
        for test, taken in running.items():
            seconds[test.partition("::")[0]] += taken
        for self.others in (False, True):
            for file in sorted(seconds, key=lambda file: seconds[file] / (1 + often[file])):
                if time.process_time() > PATIENCE:
                    return True
                if pytest.main([*OPTIONS, "-m", IN_CI, file], plugins=[self]) not in PASSED:
                    return False
        return True

    def pytest_collection_modifyitems(self, items):
        left = [item for item in items if item.nodeid not in self.done]
        items[:] = [item for item in left if item.nodeid in self.running or self.others]
        items.sort(key=lambda item: self.running.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report):
        self.done.add(report.nodeid)
        if report.failed:
            (self.root / "noticed").write_text(report.nodeid)
            self.code = KILLED_IN_CI if "ci" in report.keywords else KILLED

    def outcome(self):
        """Return the result of the mutant, or None if its process is still running."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        if process == 0 and time.monotonic() - self.started < 3600 * HOURS:
            return None
        if process == 0:
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        (self.root / "jax_lossscale" / self.mutant["file"]).write_text(self.whole)
        self.process = None
        if process == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return "timed out"
        return {0: "survived", KILLED_IN_CI: "killed in CI"}.get(os.waitstatus_to_exitcode(status), "killed")


def prepare():
    """Import the modules that all processes share, with the settings of conftest.py, which is loaded too late here."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Plugins given on the command line are still loaded.
    for module in SHARED:
        __import__(module)
    gc.freeze()  # Garbage collection in the mutants skips the imported objects.


def run(mutants, jobs, results, lines):
    """Yield mutants with their outcomes in the order in which they end.

    ``results`` are the results of previous runs.
    """
    places, waiting = [Workplace() for _ in range(jobs)], list(mutants)
    try:
        while waiting or any(place.process for place in places):
            for place in places:
                if place.process and (outcome := place.outcome()):
                    yield place.mutant, outcome, place
                if not place.process and waiting:
                    mutant = waiting.pop(0)
                    place.begin(mutant, noticed_before(mutant["file"], results), running_it(mutant, lines))
            time.sleep(0.05)
    finally:
        for place in places:
            if place.process:
                os.killpg(place.process, signal.SIGKILL)
            shutil.rmtree(place.root, ignore_errors=True)


def noticed_before(file, results):
    """Return the tests that detected other mutants of this file, and then those of its folder, latest first."""
    return [
        test
        for where in (f"{file} | ", room_of(file))
        for key, (_, test, _) in reversed(results.items())
        if test and key.startswith(where)
    ]


def all_mutants(files):
    """Yield the mutants of each file. The key contains the line, the change and a number for repeated changes."""
    for file in files:
        source = (ROOT / "jax_lossscale" / file).read_text()
        texts, seen, of_statements = source.splitlines(), Counter(), lines_of_statements(source)
        for number, before, after, mutated in mutants_of(source):
            key = " | ".join((file, texts[number - 1].strip(), before, after))
            seen[key] += 1
            yield {"file": file, "line": number, "source": mutated, "before": before, "after": after} | {
                "lines": of_statements[number],
                "key": key + (f" | {seen[key]}" if seen[key] > 1 else ""),
            }


def files_of(names):
    """Return the files of the core, or only the given files and the files in the given folders."""
    package = ROOT / "jax_lossscale"
    known = [
        str(path.relative_to(package))
        for name in CORE
        for path in sorted(package.rglob("*.py"))
        if str(path.relative_to(package)).startswith(name) and path.stem != "__init__"
    ]
    return [file for file in known if not names or any(file.startswith(name) for name in names)]


def room_of(file):
    """Return the file or folder of `CORE` that contains a file."""
    return next(name for name in CORE if file.startswith(name))


def files_of_tests(room):
    folder = ROOT / "tests"
    named = (folder / test for test in [*OF_ALL, *CORE[room]])
    files = (file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path]))
    return dict.fromkeys(str(file.relative_to(ROOT)) for file in files)


def running_it(mutant, lines):
    """Return the tests of a mutant's folder that execute its line, with their durations.

    If a line runs at import and not in a particular test, the result contains all tests of the folder.
    """
    of_room = files_of_tests(room_of(mutant["file"]))
    found = {test for line in mutant["lines"] for test in lines["run"][mutant["file"]].get(str(line), ())}
    tests = [lines["tests"][number] for number in found] or lines["tests"]
    return {test: taken for test, taken in tests if test.partition("::")[0] in of_room}


def measured_lines(jobs):
    """Return all tests, their durations and the tests that execute each line. Exit if a test fails."""
    if LINES.exists():
        return json.loads(LINES.read_text())
    files = sorted(
        {file for room in CORE for file in files_of_tests(room)}, key=lambda file: len((ROOT / file).read_text())
    )
    places = [Workplace() for _ in range(jobs)]
    children = [measure_in(place, files[number::jobs]) for number, place in enumerate(places)]
    found = {"tests": [], "run": {}}
    for child, place in zip(children, places, strict=True):
        if os.waitpid(child, 0)[1]:
            sys.exit(f"The tests fail without a mutation:\n{(place.root / 'output').read_text()}")
        part, before = json.loads((place.root / "lines").read_text()), len(found["tests"])
        found["tests"] += part["tests"]
        for file, run in part["run"].items():
            for line, tests in run.items():
                found["run"].setdefault(file, {}).setdefault(line, []).extend(before + test for test in tests)
        shutil.rmtree(place.root)
    LINES.parent.mkdir(exist_ok=True)
    LINES.write_text(json.dumps(found))
    return found


def measure_in(place, files):
    """Fork a process that records the lines executed by the tests. Return its process ID."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        place.enter()
        recorder = Recorder(place.root / "jax_lossscale")
        code = int(pytest.main([*OPTIONS, "-m", IN_CI, *files], plugins=[recorder]))
        (place.root / "lines").write_text(json.dumps(recorder.found()))
    finally:
        sys.stdout.flush()
        os._exit(code)


class Recorder:
    """A pytest plugin that records the executed lines and the duration of each test."""

    def __init__(self, package):
        self.package, self.tests = package, {}
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{package}/*"])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid):
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self):
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid] = self.tests.get(report.nodeid, 0) + report.duration

    def found(self):
        self.coverage.stop()
        numbers = {test: number for number, test in enumerate(self.tests)}
        data, run = self.coverage.get_data(), {}
        for file in data.measured_files():
            run[str(Path(file).relative_to(self.package))] = {
                line: [numbers[test] for test in tests if test in numbers]
                for line, tests in data.contexts_by_lineno(file).items()
            }
        return {"tests": [*self.tests.items()], "run": run}


def read(path):
    return json.loads(path.read_text()) if path.exists() else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files or folders below jax_lossscale")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--report", action="store_true", help="only print the known results")
    parser.add_argument("--save", action="store_true", help="also write the table to tools/mutation.md")
    parser.add_argument("--afresh", action="store_true", help="ignore all known results")
    given = parser.parse_args()
    files = files_of(given.names)
    if not files:
        parser.error(f"no file of the core has this name; choose from {', '.join(CORE)}")
    results = read(RESULTS)
    explained = read(EXPLAINED)
    known = {key for key, (outcome, *_) in results.items() if outcome != "survived"} | explained.keys()
    todo = [mutant for mutant in all_mutants(files) if given.afresh or mutant["key"] not in known]
    if todo and not given.report:
        prepare()
        lines = measured_lines(given.jobs)
        for done, (mutant, outcome, place) in enumerate(run(todo, given.jobs, results, lines), 1):
            results[mutant["key"]] = outcome, (place.root / "noticed").read_text(), str(date.today())
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{done} of {len(todo)}", end="\r", file=sys.stderr, flush=True)
    report(files_of([]) if given.save else files, results, given.save)


def report(files, results, save):
    """Print the results of each file, and the survivors without a reason."""
    explained, unexplained = read(EXPLAINED), []
    outcomes = ("killed", "killed in CI", "timed out", "explained", "survived", "not run")
    rows = [("file", "run on", *outcomes), ("---", "---", *["--:"] * len(outcomes))]
    saved, total = saved_rows(), Counter()
    for file in files:
        counts, last, mutants = Counter(), "", list(all_mutants([file]))
        if file in saved and not any(mutant["key"] in results for mutant in mutants):
            rows.append((file, *saved[file]))
            total.update(dict(zip(outcomes, map(int, saved[file][1:]), strict=True)))
            continue
        for mutant in mutants:
            outcome, _, day = results.get(mutant["key"], ("not run", "", ""))
            last = max(last, day)
            outcome = "explained" if outcome in ("survived", "not run") and mutant["key"] in explained else outcome
            counts[outcome] += 1
            if outcome == "survived":
                unexplained.append(f"{file}:{mutant['line']}: {mutant['before']}  ->  {mutant['after']}")
        rows.append((file, last, *(str(counts[outcome]) for outcome in outcomes)))
        total += counts
    rows.append(("all", "", *(str(total[outcome]) for outcome in outcomes)))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    print(table, *(unexplained or ["All mutants that survived have a reason."]), sep="\n")
    if save:
        # The metadata of an editable installation still contain the version at the time of the installation.
        ours = run_path(str(ROOT / "jax_lossscale" / "_version.py"))["__version__"]
        versions = f"jax_lossscale {ours}, jax {version('jax')}, optax {version('optax')}"
        SAVED.write_text(f"{HEAD}\n{date.today()}, {versions}.\n\n{table}")


def saved_rows():
    """Return the rows of the saved table, by file."""
    lines = [line.strip("| ").split(" | ") for line in SAVED.read_text().splitlines() if ".py |" in line]
    return {file: row for file, *row in lines}


if __name__ == "__main__":
    main()
