"""A run's waits in a Parquet file: one row for each training batch, the rest in the metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import FileAccessError, FormatError
from lightning_fastio.verdict import Verdict
from lightning_fastio.waits import STEP, Evaluation, WaitStats

FILE_NAME = "fastio_waits.parquet"
_KEY = b"lightning_fastio"


@dataclass(frozen=True)
class Record:
    """Waits of one run."""

    name: str
    steps: npt.NDArray[Any]
    """One record for each training batch, of type `STEP`."""
    evaluations: dict[str, Evaluation]
    """Waits of validation, test and prediction, by stage."""
    verdict: Verdict | None


def save_record(path: Path, waits: WaitStats, verdict: Verdict | None) -> None:
    """Write the waits of a run.

    Args:
        path: The Parquet file to write.
        waits: What was measured.
        verdict: What training was bound by.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {
        "version": 1,
        "verdict": None if verdict is None else asdict(verdict),
        "evaluations": {stage: asdict(evaluation) for stage, evaluation in waits.evaluations.items()},
    }
    table = pa.table({name: waits.steps[name] for name in STEP.names or ()})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({_KEY: json.dumps(about)}), path, compression="zstd")


def load_record(path: str | Path) -> Record:
    """Read the waits of a run.

    Args:
        path: The file, or the folder of a run; the newest record in it is taken.

    Raises:
        FileAccessError: There is no record.
        FormatError: The file holds something else.
    """
    import pyarrow.parquet as pq

    place = Path(path)
    if place.is_dir():
        found = sorted(place.rglob(FILE_NAME), key=lambda each: each.stat().st_mtime)
        if not found:
            raise FileAccessError(
                f"{place}: no {FILE_NAME} in it or below; PrefetchCallback(save=True) writes one into the folder of "
                "the logger"
            )
        place = found[-1]
    if not place.exists():
        raise FileAccessError(f"{place}: no such file or folder; expected a {FILE_NAME}, or the folder of a run")
    table = pq.read_table(place)
    about_text = (table.schema.metadata or {}).get(_KEY)
    if about_text is None or set(STEP.names or ()) - set(table.column_names):
        raise FormatError(f"{place}: not a record of PrefetchCallback(save=True)")
    about = json.loads(about_text)
    steps = np.zeros(len(table), STEP)
    for name in STEP.names or ():
        steps[name] = table[name].to_numpy()
    verdict = about["verdict"]
    return Record(
        _name_of(place),
        steps,
        {stage: Evaluation(**evaluation) for stage, evaluation in about["evaluations"].items()},
        None if verdict is None else Verdict(**verdict),
    )


def _name_of(place: Path) -> str:
    """The last two folders, such as ``lightning_logs/version_3``."""
    return "/".join(place.resolve().parent.parts[-2:]).lstrip("/") or place.stem
