"""Every code block of the README and the docs runs, in the order of its page, after ``fastio demo``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from lightning_fastio.cli import main

REPOSITORY = Path(__file__).parent.parent
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced piece of a page."""

    line: int
    language: str
    title: str | None
    code: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent, language, title, code = found.groups()
        yield Block(
            text.count("\n", 0, found.start()) + 2,
            language,
            title,
            "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)),
        )


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, word by word."""
    for line in code.replace("\\\n", " ").splitlines():
        for command in line.partition(" #")[0].split(" && "):
            words = shlex.split(command)
            if words:
                yield words


def run_command(words: list[str]) -> None:
    """Run what a reader would type, as far as it does not install or measure anything."""
    variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
    program, *arguments = words[len(variables) :]
    with mock.patch.dict(os.environ, dict(variable.split("=", 1) for variable in variables)):
        if program == "fastio":
            # The demo has a test of its own; the doctor may well find something.
            assert arguments[0] == "demo" or main(arguments) in ((0, 1) if arguments[0] == "doctor" else (0,))
        elif program == "python" and arguments[0] == "-m":
            assert (REPOSITORY / arguments[1] / "__main__.py").exists()
        elif program == "python":
            assert (REPOSITORY / arguments[0]).exists()  # see test_examples.py
        else:
            assert program in ("pip", "pytest", "git", "cd"), f"a test knows no command {program!r}"


@pytest.fixture
def reader_of_docs(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory of somebody who cloned the repository and ran the demo."""
    for name, target in (("fastio-demo", demo_folder / "fastio-demo"), ("examples", REPOSITORY / "examples")):
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fastio"])
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.usefixtures("reader_of_docs")
@pytest.mark.filterwarnings("ignore:::lightning", "ignore:No seed found")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run(page: Path):
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            # The number of the line in the page, for the traceback.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
        elif block.language == "bash":
            for words in commands(block.code):
                run_command(words)
        elif block.title is not None:
            Path(block.title).write_text(block.code)
        else:
            assert block.language in ("", "text"), (
                f"line {block.line}: {block.language} has no title, so nothing runs it"
            )


def test_ci_runs_the_commands_of_the_readme():
    installs = [
        line for block in blocks(REPOSITORY / "README.md") for line in block.code.splitlines() if line.startswith("pip")
    ]
    assert installs[0] == 'pip install -c constraints.txt -e ".[demo]" && fastio demo'
    assert installs[1] == 'pip install -c constraints.txt -e ".[test]" && pytest'
    assert installs[1] in (REPOSITORY / ".ci" / "run").read_text().splitlines()


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()) + re.findall(r"src=\"([^\"]+)\"", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
