"""The command line, `fastio`: training through LightningCLI, and the tools around it.

Options of ``fit``, ``validate``, ``test`` and ``predict`` come from four places. Each wins over those before it:
configuration files (``-c``), a ``.env`` file in the working directory, environment variables, the command line. A
variable is named after the command and the option: ``FASTIO_FIT__TRAINER__MAX_EPOCHS=3`` is
``fastio fit --trainer.max_epochs=3``.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
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
    "doctor": ("lightning_fastio.doctor", "find what keeps this machine from feeding its GPU, with the fix"),
    "tune": ("lightning_fastio.tuning", "find the loader settings that suit this machine, data and model"),
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
        import_module("lightning_fastio.trainer_cli").main(with_environment(argv, os.environ))
        return 0
    parser = _parser(argv[0] if argv else "")
    arguments = parser.parse_args(argv)
    try:
        code: int = import_module(TOOL_COMMANDS[arguments.command][0]).main(arguments)
    except FastIOError as error:
        print(f"fastio {arguments.command}: {error}", file=sys.stderr)
        return 1
    return code


def with_environment(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Add the options that environment variables set, between configuration files and the command line.

    Args:
        argv: The command and its options.
        environ: Variables; ``FASTIO_FIT__DATA__BATCH_SIZE=64`` sets ``--data.batch_size=64``, and
            ``FASTIO_FIT__CONFIG`` names a configuration file.
    """
    command, *options = argv
    if any(option == "-h" or option.partition("=")[0].endswith(("--help", ".help")) for option in options):
        return list(argv)
    prefix = f"FASTIO_{command.upper()}__"
    settings = {
        name.removeprefix(prefix).lower().replace("__", "."): value
        for name, value in environ.items()
        if name.startswith(prefix)
    }
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("-c", "--config", action="append", default=[])
    found, options = finder.parse_known_args(options)
    configs = [settings.pop("config"), *found.config] if "config" in settings else found.config
    # A class before its arguments.
    outer_first = sorted(settings, key=lambda name: name.count("."))
    return [
        command,
        *(f"--config={path}" for path in configs),
        *(f"--{name}={settings[name]}" for name in outer_first),
        *options,
    ]


def _parser(chosen: str) -> ArgumentParser:
    """The parser of all commands, with the options of the chosen one."""
    parser = ArgumentParser(prog="fastio", description="Feeds GPUs from .npy, .h5 and .parquet at the speed of memory.")
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
