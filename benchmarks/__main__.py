"""`python -m benchmarks NAME`: see the package's docstring."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import benchmarks

# Each is a module with `run(folder, console)`, which gives figures in types that JSON has.
NAMES = ("formats", "cold", "rows", "memory", "plan", "prefetch", "convert")


def main() -> int:
    """Run the benchmarks that are named."""
    parser = ArgumentParser(
        prog="python -m benchmarks", description=benchmarks.__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures here")
    parser.add_argument("--folder", type=Path, help="where the temporary data goes, to choose the disk")
    arguments = parser.parse_args()
    # Worker processes import this module, and should not import torch with it.
    from benchmarks.measure import describe_machine

    figures = {"machine": describe_machine()}
    for name in arguments.names:
        with TemporaryDirectory(prefix="fastio-benchmark-", dir=arguments.folder) as folder:
            figures[name] = import_module(f"benchmarks.{name}").run(Path(folder), Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
