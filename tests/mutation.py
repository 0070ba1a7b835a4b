"""Break the core in small ways, one at a time, and see whether a test notices.

    python tests/mutation.py                      every file of the core; goes on where it was stopped
    python tests/mutation.py _tree.py --jobs 4    one file, or one folder, four mutants at a time
    python tests/mutation.py --report             only what is known
    python tests/mutation.py --save               writes the table to tests/mutation.md, too

A mutant is a copy of the package with one expression changed: a comparison, an operator, a number, the branches of a
selection, a check left out. Of the tests of its folder (`CORE` in `source_map.py`) those that run its line run on it
until one fails: first those that noticed other mutants of the same file, or folder, then files that are quick, or
noticed many. If none fails, or none within `PATIENCE`, the mutant has survived: a test is missing, or the change makes
no difference, and `tests/mutation_explained.json` says why. At the end there is a table, and below it the survivors
without a reason.

Which test runs which line is measured once, on the package as it is, in ``.mutation/lines.json``; so it is seen, too,
that all of them pass there. Delete that file after a change of the package or of a test.

What is known is kept in ``.mutation/results.json``, by the text of the line and of the change: what came of it, which
test noticed, and the day. It serves until that line, or a test, is changed (``--afresh`` forgets it). A survivor
without a reason is run again each time; one with a reason only ``--afresh``.
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

import coverage
import pytest
from source_map import CORE, OF_ALL

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / ".mutation" / "results.json"
LINES = ROOT / ".mutation" / "lines.json"
EXPLAINED = ROOT / "tests" / "mutation_explained.json"
SAVED = ROOT / "tests" / "mutation.md"
HEAD = """# What tests notice of a broken core

Each mutant is a copy of the package with one expression changed; `python tests/mutation.py --save` makes them, runs the
tests on each, and writes this page. "In CI" are those that a test noticed first which the README's command leaves out;
"explained", those that make no difference: `mutation_explained.json` says why; "not run", those not tried yet. A file
that was not run again has the row of the day on which it was.
"""
CPU_SECONDS = 1800  # after which a mutant counts as noticed: it does not end
HOURS = 2  # likewise, where it waits instead; on a busy machine a mutant waits, too
PATIENCE = 60  # CPU seconds of tests that pass, after which no further file is run: it has survived
KILLED, KILLED_IN_CI = 1, 2  # exit status: by a test that README's command runs, or by one that only CI runs
PASSED = (0, 5)  # what pytest says, the second where there was no test
IN_CI = "not slow and not peers"
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "hypothesispytest", "-o", "addopts=")
FIRST = 12  # tests that noticed other mutants, which run before all others
# What is imported before a mutant is: it takes longer than most tests.
SHARED = ("jax", "optax", "chex", "flax.nnx", "equinox", "hypothesis", "jax.experimental.sparse")
SHARED += ("flax.serialization", "jaxlib.mlir.dialects.mhlo")

# Mutants.

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
    """``(line number, before, after, mutated source)`` for each way to break it."""
    for node in worth_breaking(ast.parse(source)):
        for broken in broken_nodes(node):
            start, end = (offset_of(source, node, which) for which in ("", "end_"))
            after = "pass" if broken is None else ast.unparse(broken)
            after = f"({after})" if isinstance(broken, ast.expr) else after
            yield node.lineno, source[start:end], after, source[:start] + after + source[end:]


def worth_breaking(node):
    """All expressions and statements that run and decide something: no annotation, no message, no decorator."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_typing(child) and not is_strict(child):
                yield child
                yield from worth_breaking(child)


def is_strict(node):
    """``strict=`` of `zip`, with which the code checks itself: both are of one length by construction."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def is_typing(node):
    is_alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
    of_type = (
        isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)) and "[" in ast.unparse(node)
    )
    name = ast.unparse(node.targets[0]).lstrip("_") if of_type else ""
    return is_alias or (name[:1].isupper() and not name.isupper())


def broken_nodes(node):
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
    """By line, the lines of the statement that it is part of; of a block only its head."""
    found = {}
    for node in ast.walk(ast.parse(source)):  # from the outermost on
        if isinstance(node, ast.stmt):
            end = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
            lines = range(node.lineno, max(node.lineno, end) + 1)
            found |= dict.fromkeys(lines, lines)
    return found


def offset_of(source, node, which):
    lines = source.splitlines(keepends=True)
    line, column = getattr(node, f"{which}lineno"), getattr(node, f"{which}col_offset")
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


# Running them.


class Workplace:
    """A copy of the project, in which one file at a time is broken."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="mutation-"))
        leave_out = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        for name in ("jax_lossscale", "tests", "docs"):
            shutil.copytree(ROOT / name, self.root / name, ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        # By their contents: a mutant may be as long as another of the same second.
        compileall.compile_dir(self.root, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self.process = self.mutant = None

    def begin(self, mutant, noticed, running):
        """Fork: what takes longest to import is there already."""
        self.mutant, self.started = mutant, time.monotonic()
        (self.root / "noticed").write_text("")
        broken = self.root / "jax_lossscale" / mutant["file"]
        self.whole = broken.read_text()
        broken.write_text(mutant["source"])
        self.process = os.fork()
        if self.process == 0:
            self.code = KILLED
            try:
                os.setpgid(0, 0)  # so that what it starts ends with it
                resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.RLIM_INFINITY))
                self.enter()
                if self.all_pass(noticed, running):
                    self.code = 0
            except BaseException:
                traceback.print_exc()
            finally:  # never back into the loop of the parent
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
        """Whether ``running``, the tests that run the line, pass; and all others of their files.

        What one of these traced, JAX may have kept for the others. ``noticed``: the tests that noticed other mutants.
        """
        self.running, self.others, self.done = running, False, set()
        # Only a test that fails counts here: one that is not found any more fails below, if it has to.
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
        """``None`` while it runs."""
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
    """Import what all processes share, with the settings of conftest.py, which comes too late here."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # but those that are named
    for module in SHARED:
        __import__(module)
    gc.freeze()  # a collector need not look at it in each mutant


def run(mutants, jobs, results, lines):
    """Yield each mutant with its outcome, as they end; ``results`` are those of before."""
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
    """Return the tests that noticed other mutants of this file, and then of its folder, the last one first."""
    return [
        test
        for where in (f"{file} | ", room_of(file))
        for key, (_, test, _) in reversed(results.items())
        if test and key.startswith(where)
    ]


def all_mutants(files):
    """Of each file, those that differ in line, change and how many of the same came before."""
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
    """The files of the core, or those that are named, or lie in a folder that is."""
    package = ROOT / "jax_lossscale"
    known = [
        str(path.relative_to(package))
        for name in CORE
        for path in sorted(package.rglob("*.py"))
        if str(path.relative_to(package)).startswith(name) and path.stem != "__init__"
    ]
    return [file for file in known if not names or any(file.startswith(name) for name in names)]


def room_of(file):
    return next(name for name in CORE if file.startswith(name))


def files_of_tests(room):
    folder = ROOT / "tests"
    named = (folder / test for test in [*OF_ALL, *CORE[room]])
    files = (file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path]))
    return dict.fromkeys(str(file.relative_to(ROOT)) for file in files)


def running_it(mutant, lines):
    """Return, of each test of a mutant's folder that runs its line, how long it takes.

    What is run when a module is imported no single test runs: it is all of them.
    """
    of_room = files_of_tests(room_of(mutant["file"]))
    found = {test for line in mutant["lines"] for test in lines["run"][mutant["file"]].get(str(line), ())}
    tests = [lines["tests"][number] for number in found] or lines["tests"]
    return {test: taken for test, taken in tests if test.partition("::")[0] in of_room}


def measured_lines(jobs):
    """Return which tests there are, how long they take, and of each line which of them run it; exit if one fails."""
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
            sys.exit(f"The tests fail without a change:\n{(place.root / 'output').read_text()}")
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
    """Begin to measure tests, in a process of their own."""
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
    """A plugin of pytest that notes which test runs which lines, and how long it takes."""

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
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--save", action="store_true", help="write the table to tests/mutation.md, too")
    parser.add_argument("--afresh", action="store_true", help="run again what is known, too")
    given = parser.parse_args()
    files = files_of(given.names)
    if not files:
        parser.error(f"tests are named for {', '.join(CORE)}")
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
    """Print what came of each file, and the survivors of which nobody has said why."""
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
    print(table, *(unexplained or ["Of those that were run, no survivor is without a reason."]), sep="\n")
    if save:
        versions = ", ".join(f"{name} {version(name)}" for name in ("jax_lossscale", "jax", "optax"))
        SAVED.write_text(f"{HEAD}\n{date.today()}, {versions}.\n\n{table}")


def saved_rows():
    """The rows of the table as it was saved, by file."""
    lines = [line.strip("| ").split(" | ") for line in SAVED.read_text().splitlines() if ".py |" in line]
    return {file: row for file, *row in lines}


if __name__ == "__main__":
    main()
