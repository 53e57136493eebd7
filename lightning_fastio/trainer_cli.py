"""``fastio fit``, ``validate``, ``test`` and ``predict``: LightningCLI over every option of model, data and Trainer.

Options come from four places. Each wins over those before it: configuration files (``-c``), a ``.env`` file in the
working directory, environment variables, the command line. A variable is named after the command and the option:
``FASTIO_FIT__TRAINER__MAX_EPOCHS=3`` is ``fastio fit --trainer.max_epochs=3``.
"""

from __future__ import annotations

import os
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Classes that are imported can be given by their short names, such as --data=NumpyDataModule.
import lightning_fastio.callbacks
import lightning_fastio.datamodules  # noqa: F401
from lightning_fastio.misspelled import cause_of


class FastIOCLI(LightningCLI):
    """LightningCLI that is told its options, where Lightning's warns when they are not those of the process."""

    def __init__(self, options: Sequence[str], *, run: bool = True) -> None:
        """Build model, data and Trainer.

        Args:
            options: A command and its options; options alone if nothing is to run.
            run: Whether to run the command.
        """
        self._options = options
        self._parsers: list[LightningArgumentParser] = []
        self._command = f"fastio {options[0]}" if run else "fastio tune"
        super().__init__(
            # Without a logger it goes to the working directory, where a config.yaml is the user's own.
            save_config_kwargs={"config_filename": "run_config.yaml", "overwrite": True},
            parser_kwargs={"exit_on_error": False},
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Remember what has the options, among which a misspelled one is looked for."""
        self._parsers.append(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options; the last line of an error says what is wrong."""
        try:
            self.config = parser.parse_args(self._options)
        except ArgumentError as error:
            message = str(error)
            cause = cause_of(message, "".join(each.format_usage() for each in self._parsers))
            # The usage, three pages of it, is left out: it would push the message off the screen.
            lines = [cause] if cause and "\n" not in message else filter(None, [message, cause])
            parser.exit(2, "\n\n".join(f"{self._command}: {line}" for line in lines) + "\n")


def main(argv: Sequence[str]) -> None:
    """Build model, data and Trainer from options and run the command that stands first."""
    FastIOCLI(with_environment(argv, os.environ))


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
