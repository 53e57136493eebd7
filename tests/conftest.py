"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

# Lightning's command line uses names that jsonargparse will remove in version 5.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# Operations as small as those of tests are slower in several threads, which wait for each other.
torch.set_num_threads(1)


# A shell that starts tests in the background ignores interrupts, and so would every process below it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which somebody has run ``fastio demo``: it holds ``fastio-demo/``."""
    from lightning_fastio.demo import write_digits

    folder = tmp_path_factory.mktemp("demo")
    write_digits(folder / "fastio-demo")
    return folder
