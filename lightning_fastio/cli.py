"""The command line, `fastio`: training through LightningCLI, and the tools around it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dotenv import load_dotenv

from lightning_fastio import __version__
from lightning_fastio.errors import FastIOError

TRAINER_COMMANDS = {
    "fit": "train a model, from YAML, environment variables and options",
    "validate": "run one validation epoch",
    "test": "run one test epoch",
    "predict": "run inference",
}

# A module is imported when its command runs; it has `add_arguments(parser)` and `main(arguments) -> exit code`.
TOOL_COMMANDS = {
    "demo": ("lightning_fastio.demo", "train on real data from all three formats, in under two minutes"),
    "inspect": ("lightning_fastio.inspection", "show what is in a file, and how each field is read"),
    "convert": ("lightning_fastio.convert.command", "turn images, text, tables or arrays into files that train fast"),
    "verify": ("lightning_fastio.convert.check", "check every byte of converted data against its manifest"),
    "doctor": ("lightning_fastio.doctor", "find what keeps this machine from feeding its GPU, with the fix"),
    "tune": ("lightning_fastio.tuning", "find the loader settings that suit this machine, data and model"),
    "report": ("lightning_fastio.report", "make a page of how long the steps of a run waited, or compare two runs"),
    "bench": ("lightning_fastio.bench", "measure your own data: the usual loader, this package, the machine's limit"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options; those of the process by default.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # First of all, since libraries read some variables only when they are imported.
    load_dotenv(Path.cwd() / ".env")
    # An installed command does not see the project in the working directory by itself, as `python train.py` does.
    sys.path.insert(0, str(Path.cwd()))
    if argv and argv[0] in TRAINER_COMMANDS:
        import_module("lightning_fastio.trainer_cli").main(argv)
        return 0
    parser = _parser(argv[0] if argv else "")
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    arguments = parser.parse_args(argv)
    try:
        code: int = import_module(TOOL_COMMANDS[arguments.command][0]).main(arguments)
    except FastIOError as error:
        print(f"fastio {arguments.command}: {error}", file=sys.stderr)
        return 1
    return code


def _parser(chosen: str) -> ArgumentParser:
    """The parser of all commands, with the options of the chosen one."""
    parser = ArgumentParser(
        prog="fastio",
        description="Feeds GPUs from .npy, .h5 and .parquet at the speed of memory.",
        epilog="fastio COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"lightning_fastio {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=summary)
    for name, (module, summary) in TOOL_COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            import_module(module).add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
