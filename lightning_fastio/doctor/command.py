"""``fastio doctor``: findings as a table or as JSON, and the exit code."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fastio.doctor.diagnosis import diagnose
from lightning_fastio.doctor.machine import Finding, Severity
from lightning_fastio.quantities import counted

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}
"""From the gravest to the lightest."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", nargs="*", help="data files or folders to look at")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu", action="store_true", help="measure copies to the GPUs; starts CUDA")
    parser.add_argument("--no-measure", action="store_true", help="do not measure how fast the paths can be read")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch (256)")
    parser.add_argument("--num-workers", type=int, help="workers of a loader; by default what 'auto' takes")
    parser.add_argument("--prefetch-factor", type=int, default=2, help="batches that each worker reads ahead (2)")


def main(arguments: Namespace) -> int:
    """Run the command; the exit code is 1 if there are errors."""
    findings = diagnose(
        *arguments.path,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        prefetch_factor=arguments.prefetch_factor,
        measure=not arguments.no_measure,
        gpu=arguments.gpu,
    )
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_table(findings)
    return int(any(finding.severity == "error" for finding in findings))


def print_table(findings: Sequence[Finding]) -> None:
    """Print a table as wide as the terminal, the gravest findings first."""
    table = Table("", "check", "finding", "why it matters", "what to do", show_lines=True)
    gravest_first = list(_STYLES)
    for finding in sorted(findings, key=lambda each: gravest_first.index(each.severity)):
        # As plain text: brackets in paths and commands are no markup.
        cells = [Text(cell) for cell in (finding.check, finding.finding, finding.why, finding.fix)]
        table.add_row(Text(finding.severity, style=_STYLES[finding.severity]), *cells)
    console = Console()
    console.print(table)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _STYLES}
    nouns: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "hint"}
    console.print(", ".join(counted(counts[severity], noun) for severity, noun in nouns.items()))
