"""``fastio fit``, ``validate``, ``test`` and ``predict``: LightningCLI over every option of model, data and Trainer."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Classes that are imported can be given by their short names, such as --data=NumpyDataModule.
import lightning_fastio.callbacks
import lightning_fastio.datamodules  # noqa: F401


class FastIOCLI(LightningCLI):
    """LightningCLI that is told its options, where Lightning's warns when they are not those of the process."""

    def __init__(self, options: Sequence[str], *, run: bool = True) -> None:
        """Build model, data and Trainer.

        Args:
            options: A command and its options; options alone if nothing is to run.
            run: Whether to run the command.
        """
        self._options = options
        super().__init__(save_config_kwargs={"overwrite": True}, run=run)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options."""
        self.config = parser.parse_args(self._options)


def main(argv: Sequence[str]) -> None:
    """Build model, data and Trainer from options and run the command that stands first."""
    FastIOCLI(argv)
