"""Execute the notebooks of this folder from top to bottom, in place: ``python notebooks/execute.py [NAME ...]``.

With ``--check``, nothing is written, and two notebooks run in parallel. Each notebook must run without an error and
within the time limit. This needs ``pip install -e ".[demo,plot]" --group notebooks``, with pip 25.1 or newer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from traitlets.config import Config

FOLDER = Path(__file__).parent
SECONDS_PER_NOTEBOOK = 180


def main() -> int:
    """Execute the notebooks on the command line. Return the exit status, which is 1 if a notebook takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks",
        nargs="*",
        type=Path,
        help="(default: all notebooks in this folder)",
    )
    parser.add_argument("--check", action="store_true", help="do not write the outputs")
    options = parser.parse_args()
    paths = options.notebooks or sorted(FOLDER.glob("*.ipynb"))

    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def seconds_of(path: Path) -> float:
            task = progress.add_task(path.name)
            notebook = nbformat.read(path, as_version=4)
            start = time.perf_counter()
            execute(notebook)
            seconds = time.perf_counter() - start
            progress.remove_task(task)
            console.print(f"{path.name}: {seconds:.0f} s")
            if not options.check:
                nbformat.write(notebook, path)
            return seconds

        # Outputs may contain run times, so only one notebook runs at a time if outputs are written.
        with ThreadPoolExecutor(2 if options.check else 1) as executor:
            seconds = dict(zip(paths, executor.map(seconds_of, paths), strict=True))
    too_long = [path.name for path in paths if seconds[path] > SECONDS_PER_NOTEBOOK]
    if too_long:
        console.print(f"Longer than {SECONDS_PER_NOTEBOOK} s: {', '.join(too_long)}")
    return 1 if too_long else 0


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in a new kernel of this interpreter. An error in a cell is raised."""
    with tempfile.TemporaryDirectory() as folder:
        sockets = {
            "transport": "ipc",
            "ip": str(Path(folder) / "kernel"),
        }  # The kernel uses files instead of ports.
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_NOTEBOOK,
            kernel_name="python3",
            record_timing=False,  # Timings would change the file on every execution.
            resources={"metadata": {"path": str(FOLDER)}},
            config=Config(KernelManager=sockets),
        )
        client.execute()
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"


if __name__ == "__main__":
    sys.exit(main())
