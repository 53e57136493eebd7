"""``fastio tune``: model, data and Trainer out of the configuration of ``fastio fit``, and settings for it."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Literal

from rich.console import Console

from lightning_fastio.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-c", "--config", action="append", default=[], help="configuration of fastio fit")
    parser.add_argument("options", nargs="*", help="options of fastio fit, after --, such as -- --data.batch_size=64")
    parser.add_argument("--loader-only", action="store_true", help="do not measure the training step; no CUDA then")
    parser.add_argument(
        "--batch-size", default="keep", metavar="SIZES", help="auto, or sizes such as 64,128,256; keep by default"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time that it takes at most (60)")
    parser.add_argument("--output", default="tuned.yaml", help="the YAML to write (tuned.yaml)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: Namespace) -> int:
    """Run the command."""
    from lightning_fastio.datamodules import FastIODataModule
    from lightning_fastio.trainer_cli import FastIOCLI, with_environment
    from lightning_fastio.tuning.tuner import tune

    fit = ["fit", *(f"--config={path}" for path in arguments.config), *arguments.options]
    options = with_environment(fit, os.environ)[1:]
    if not options:
        raise ConfigError(
            "which model and data? Give the configuration of fastio fit, as in: fastio tune -c config.yaml; or its "
            "options after --, as in: fastio tune -- --model=my_project.MyModel --data=HDF5DataModule "
            "--data.train=data.h5"
        )
    cli = FastIOCLI(options, run=False)
    if not isinstance(cli.datamodule, FastIODataModule):
        raise ConfigError(f"data: {type(cli.datamodule).__name__} has no settings to tune; expected a FastIODataModule")
    tuning = tune(
        cli.datamodule,
        None if arguments.loader_only else cli.model,
        trainer=cli.trainer,
        seconds=arguments.seconds,
        batch_sizes=_batch_sizes(arguments.batch_size),
    )
    tuning.save(arguments.output)
    if arguments.json:
        print(json.dumps(tuning.as_dict(), indent=2))
    else:
        console = Console()
        console.print(tuning.report())
        configs = " ".join(f"-c {path}" for path in [*arguments.config, arguments.output])
        console.print(f"Use it: fastio fit {configs}", highlight=False)
    return 0


def _batch_sizes(text: str) -> Sequence[int] | Literal["keep", "auto"]:
    if text == "keep":
        return "keep"
    if text == "auto":
        return "auto"
    try:
        return [int(size) for size in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-size {text}: expected auto, keep, or sizes such as 64,128,256") from error
