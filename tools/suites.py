"""Run the tests of another project, execute every program under `autocast` as well, and compare the results.

    python tools/suites.py equinox CHECKOUT                      for ten minutes; resumes an interrupted run
    python tools/suites.py jax CHECKOUT --minutes 60 --seed 1    other tests, in another order
    python tools/suites.py equinox CHECKOUT --test NODEID        one test, with the traceback of each crash
    python tools/suites.py --report                              only print the known results
    python tools/suites.py --save                                also write the table to tools/suites.md

CHECKOUT is a checkout of the installed version of the project. Its tests run unchanged. A pytest plugin
(`suites_shim.py`) replaces `jax.jit`, `jax.grad` and similar functions. Programs are identified by their jaxpr, and
each program counts once. Programs without float32 values, and programs that fail without `autocast`, do not count. The
plugin performs three checks:

- *trace*: Types, structure, weak types, varying axes and shardings of results and gradients equal those of the original
  program.
- *exact*: The plan for float16, executed in float32, gives the same results and gradients as the original program. The
  test receives these results. If the test fails with these results, it must also fail without `autocast`.
- *numbers*: The errors of results and gradients in float16 and bfloat16 are at most twice those of manual casts.
  `random_programs.py` describes this comparison and its outcomes. Because the program is compiled with the default
  options of XLA, the check also fails if the forward and backward pass use different values.

A difference counts as *as with jit* if `jax.jit` in place of `autocast` causes it as well. The column *not run* counts
files that cannot be collected, processes that crash, and projects without any test. The column *failed* counts failed
tests. Most of these tests also fail without `autocast`. The other tests also count as *assertion*.

``.suites/PROJECT.jsonl`` contains the known results; delete it to start again. `tools/suites_explained.json` explains
differences. The keys in this file are regular expressions, and the values are reasons.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parent.parent
EXPLAINED = ROOT / "tools" / "suites_explained.json"
SAVED = ROOT / "tools" / "suites.md"
HEAD = """# Test suites of other projects under autocast

`python tools/suites.py` runs the tests of other projects, and executes every program under `autocast` as well. With
`--save`, it writes this page. The docstring of `tools/suites.py` describes the checks. The columns "values" and
"gradients" count the programs whose values or gradients were compared with those of the original program in float16 and
in bfloat16. The column "in float32" counts the programs whose plan was also executed in float32.
"""
# For each project, the name of its distribution and the patterns of its test files.
PROJECTS = {
    "jax": (
        "jax",
        [
            *("tests/lax_control_flow_test.py", "tests/lax_autodiff_test.py", "tests/custom_api_test.py"),
            *("tests/custom_root_test.py", "tests/custom_linear_solve_test.py", "tests/shard_map_test.py"),
            *("tests/nn_test.py", "tests/api_test.py", "tests/export_test.py", "tests/batching_test.py"),
            *("tests/lax_test.py", "tests/lax_numpy_test.py", "tests/linalg_test.py", "tests/lax_vmap_test.py"),
            *("tests/lax_numpy_einsum_test.py", "tests/image_test.py", "tests/pjit_test.py", "tests/ode_test.py"),
            *("tests/lax_scipy_test.py", "tests/lax_numpy_reducers_test.py", "tests/lax_numpy_indexing_test.py"),
        ],
    ),
    "flax": ("flax", ["tests/**/*_test.py"]),
    "equinox": ("equinox", ["tests/test_*.py"]),
    "haiku": ("dm-haiku", ["haiku/_src/**/*_test.py"]),
    "optax": ("optax", ["optax/**/*_test.py"]),
    "diffrax": ("diffrax", ["test/test_*.py"]),
    "optimistix": ("optimistix", ["tests/test_*.py"]),
    "lineax": ("lineax", ["tests/test_*.py"]),
    "numpyro": ("numpyro", ["test/**/test_*.py"]),
    "distrax": ("distrax", ["distrax/**/*_test.py"]),
    "flowjax": ("flowjax", ["tests/**/test_*.py"]),
    "rlax": ("rlax", ["rlax/**/*_test.py"]),
    "e3nn": ("e3nn-jax", ["tests/**/*_test.py"]),
    "tinygp": ("tinygp", ["tests/**/test_*.py"]),
    "ott": ("ott-jax", ["tests/**/*_test.py"]),
    "jaxopt": ("jaxopt", ["tests/*_test.py"]),
    "kfac": ("kfac-jax", ["tests/test_*.py"]),
    "planted": ("jax", ["test_*.py"]),  # `test_suites.py` creates this project.
}
OPTIONS = ("-q", "--no-header", "--tb=short", "-p", "suites_shim", "-p", "no:cacheprovider", "-W", "ignore")
OPTIONS += ("--continue-on-collection-errors", "-o", "addopts=", "--assert=plain")

# Without these optimizations of the generated code, compilation takes a fifth of the time. They do not affect the
# optimizations of the HLO, such as the removal of casts.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", nargs="?", choices=sorted(PROJECTS))
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", help="run only this test, and print the traceback of each crash")
    parser.add_argument("--results", type=Path, default=ROOT / ".suites", help="the folder of the known results")
    parser.add_argument("--report", action="store_true", help="only print the known results")
    parser.add_argument("--save", action="store_true", help="also write the table to tools/suites.md")
    given = parser.parse_args()
    given.results.mkdir(exist_ok=True)
    if given.test or (not given.report and given.project):
        if not given.checkout:
            parser.error("the argument CHECKOUT is missing")
        run(given) if not given.test else show(given)
    if not given.test:
        report(given.results, given.save)


def run(given):
    """Run the test files of a project in several processes, one after another, because a process may crash."""
    path, end = given.results / f"{given.project}.jsonl", time.time() + 60 * given.minutes
    command = ["git", "describe", "--always", "--tags"]
    commit = subprocess.run(command, cwd=given.checkout, capture_output=True, text=True)
    distribution, patterns = PROJECTS[given.project]
    with path.open("a") as file:
        about = {"version": version(distribution), "commit": commit.stdout.strip(), "day": str(date.today())}
        file.write(json.dumps({"run": about}) + "\n")
    files = sorted({file for pattern in patterns for file in given.checkout.glob(pattern)})
    files = [str(file.relative_to(given.checkout)) for file in files]
    if not files:
        sys.exit(f"{given.checkout} contains no test file of {given.project}.")
    random.Random(given.seed).shuffle(files)
    count = max(1, min(len(files), round(given.minutes / MINUTES)))
    for number in range(count):
        seconds, before = (end - time.time()) / (count - number), len(read(path))
        status = pytest_of(given, files[number::count], path, seconds)
        if status not in STATUSES:
            with path.open("a") as results:
                results.write(json.dumps({"not run": f"pytest ended with status {status}", "test": ""}) + "\n")
        records = read(path)[before:]
        checked = {each["test"] for each in records if "program" in each}
        failed = {each["test"]: each for each in records if each.get("outcome") == "failed" and each["test"] in checked}
        # Run failed tests again with the original results, to determine whether `autocast` caused the failure.
        if failed:
            again = path.with_suffix(".again")
            again.unlink(missing_ok=True)
            pytest_of(given, [*failed], again, seconds / 4, is_exact=False)
            outcomes = {(each["test"], each["outcome"]) for each in read(again) if "outcome" in each}
            # A test with subtests has several outcomes.
            passed = [t for t in failed if (t, "passed") in outcomes and (t, "failed") not in outcomes]
            with path.open("a") as results:
                for test in passed:
                    results.write(json.dumps({"assertion": failed[test]["message"], "test": test}) + "\n")
        print(f"{number + 1} of {count} processes", file=sys.stderr, flush=True)


def pytest_of(given, tests, path, seconds, is_exact=True, verbose=False):
    """Run tests of a project in a subprocess, and return its exit status."""
    about = {
        "file": str(path.resolve()),
        "seconds": seconds,
        "is_exact": is_exact,
        "verbose": verbose,
        "seed": given.seed,
    }
    # The package is imported from the checkout, because the tests of some projects are part of the package.
    own = [] if given.project == "jax" else [str(given.checkout.resolve())]
    environment = {
        **os.environ,
        "SUITES": json.dumps(about),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools"), *own]),
        "XLA_FLAGS": FLAGS,
        "JAX_COMPILATION_CACHE_DIR": str(given.results.resolve() / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    # Without `-P`, `import jax` would import the checkout.
    command = [sys.executable, "-P", "-m", "pytest", *OPTIONS, *(["-s"] if verbose else []), *tests]
    with path.with_suffix(".log").open("a") as log:
        output = None if verbose else log
        process = subprocess.Popen(command, cwd=given.checkout, env=environment, stdout=output, stderr=output)
        try:
            process.wait(timeout=seconds + 300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode


def show(given):
    """Run one test and print its records."""
    path = given.results / f"{given.project}.one"
    path.unlink(missing_ok=True)
    pytest_of(given, [given.test], path, 600, verbose=True)
    for record in read(path):
        print(json.dumps(record, indent=1))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def differences_in(records):
    """Yield the kind of each difference, and a line that describes it and names the test.

    Each kind counts once for each program, and a program that crashes counts only as a crash.
    """
    for record in records:
        found = {}
        for check, outcome in record.get("outcomes", {}).items():
            if outcome in ("crash", "differs"):
                kind = "crash" if outcome == "crash" else check.partition(" ")[0]
                detail = record["details"].get(check, "")
                found.setdefault(kind, f"{check}: {detail} [{record['kind']}, {record['test']}]")
        yield from [("crash", found["crash"])] if "crash" in found else found.items()
        if "assertion" in record:
            yield "assertion", f"assertion: {record['assertion'].splitlines()[:1]} [{record['test']}]"
        if "not run" in record:
            yield "not run", f"not run: {record['not run']} [{record['test']}]"
        if "error of the shim" in record:
            yield "shim", f"error of the shim: {record['error of the shim'].splitlines()[-1][:300]} [{record['test']}]"


MINUTES = 4  # Each process runs for about this number of minutes.
STATUSES = (0, 1, 2)  # The exit statuses of pytest if it ran tests: all passed, some failed, or the time was up.
COUNTED = ("tests", "failed", "programs", "values", "gradients", "in float32")
OUTCOMES = ("as with jit", "sensitive", "rounding")
KINDS = ("crash", "trace", "exact", "assertion", "numbers", "shim", "not run")


def report(results, save):
    """Print the table and the differences by reason. Differences without a reason are printed one by one."""
    reasons = json.loads(EXPLAINED.read_text()) if EXPLAINED.exists() else {}
    head = ("project", "version", "commit", "run on", *COUNTED, *OUTCOMES, *KINDS)
    rows, total = [head, ("---",) * 4 + ("--:",) * (len(head) - 4)], Counter()
    explained, unexplained, failures = Counter(), [], []
    for path in sorted(results.glob("*.jsonl")):
        records = read(path)
        about = next(record["run"] for record in reversed(records) if "run" in record)
        counts = Counter(tests=len({record["test"] for record in records if "outcome" in record}))
        if not counts["tests"]:
            records.append({"not run": "no test ran", "test": ""})
        failed = {record["test"]: record for record in records if record.get("outcome") == "failed"}
        failures += [f"{path.stem}: {each['message'].splitlines()[:1]} [{each['test']}]" for each in failed.values()]
        counts["failed"] = len(failed)
        for record in records:
            outcomes = record.get("outcomes", {})
            counts["programs"] += bool(outcomes)
            counts["in float32"] += "exact" in outcomes
            for name, suffix in (("values", ""), ("gradients", " of the gradient")):
                counts[name] += all(f"numbers in {dtype}{suffix}" in outcomes for dtype in ("float16", "bfloat16"))
            for outcome in OUTCOMES:
                counts[outcome] += outcome in outcomes.values()
        for kind, line in differences_in(records):
            counts[kind] += 1
            reason = next((reason for pattern, reason in reasons.items() if re.search(pattern, line)), None)
            if reason:
                explained[kind, reason] += 1
            else:
                unexplained.append(f"{path.stem}: {line}")
        total += counts
        rows.append((path.stem, *about.values(), *(str(counts[name]) for name in head[4:])))
    rows.append(("all", "", "", "", *(str(total[name]) for name in head[4:])))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    lines = [("check", "number", "reason"), ("---", "--:", "---")]
    lines += [(kind, str(count), reason) for (kind, reason), count in explained.most_common()]
    table += "\n" + "".join(f"| {' | '.join(row)} |\n" for row in lines)
    print(table, "Failed tests:", *grouped(failures), "Differences:", *grouped(unexplained), sep="\n")
    print(f"Differences without a reason: {len(unexplained)}.")
    if save:
        # The metadata of an editable installation still contain the version at the time of the installation.
        ours = run_path(str(ROOT / "jax_lossscale" / "_version.py"))["__version__"]
        versions = f"jax_lossscale {ours}, jax {version('jax')}"
        rest = f"Versions: {versions}. Differences without a reason: {len(unexplained)}."
        SAVED.write_text(f"{HEAD}\n{rest}\n\n{table}")


def grouped(lines):
    """Group lines that differ only in numbers and test names. Return the first line and the size of each group."""
    groups = {}
    for line in lines:
        groups.setdefault(re.sub(r"[0-9]+|\[[^][]*\]$", "", line), []).append(line)
    return [f"{len(group)} x {group[0]}" for group in sorted(groups.values(), key=len, reverse=True)]


if __name__ == "__main__":
    main()
