"""Findings as a table or as JSON, and the exit code of ``fastio doctor``."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_fastio.doctor.diagnosis import diagnose
from lightning_fastio.doctor.machine import Finding, Severity

_STYLES: dict[Severity, str] = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def run_doctor(
    paths: Sequence[str | Path] = (),
    *,
    json: bool = False,
    gpu: bool = False,
    measure: bool = True,
    batch_size: int = 256,
    num_workers: int | None = None,
    prefetch_factor: int = 2,
) -> int:
    """Print what keeps this machine from feeding its GPU, and what to do about it.

    Args:
        paths: Data files or folders to look at.
        json: Print a JSON list instead of a table.
        gpu: Also measure copies to the GPUs; starts CUDA.
        measure: Measure how fast the paths can be read, a second or two for each.
        batch_size: Rows of a batch.
        num_workers: Worker threads or processes of a loader; None for what ``auto`` takes.
        prefetch_factor: Batches that each worker reads ahead.

    Returns:
        Exit code: 1 if there are errors, else 0.
    """
    findings = diagnose(
        *paths,
        batch_size=batch_size,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        measure=measure,
        gpu=gpu,
    )
    if json:
        print(json_module.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_table(findings)
    return int(any(finding.severity == "error" for finding in findings))


def print_table(findings: Sequence[Finding]) -> None:
    """Print a table to the terminal, as wide as it is, the gravest findings first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "finding", "why it matters", "what to do", show_lines=True)
    gravest_first = list(reversed(_STYLES))
    for finding in sorted(findings, key=lambda each: gravest_first.index(each.severity)):
        style = _STYLES[finding.severity]
        # As plain text: brackets in paths and commands are no markup.
        cells = [Text(cell) for cell in (finding.check, finding.finding, finding.why, finding.fix)]
        table.add_row(Text(finding.severity, style=style), *cells)
    console = Console()
    console.print(table)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _STYLES}
    console.print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['info']} hints")
