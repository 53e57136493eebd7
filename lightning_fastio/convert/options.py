"""The options of a conversion: those that decide the rows, and those that say how to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.convert.source import Engine
from lightning_fastio.errors import ConfigError

Kind: TypeAlias = Literal["auto", "images", "text", "table"]

IMAGE_OPTIONS = (
    "size", "resize", "channels", "background", "encoded", "ragged",
    "labels", "masks", "classes", "paths", "max_pixels",
)  # fmt: skip
TEXT_OPTIONS = ("tokenizer", "documents", "end_of_text")
TABLE_OPTIONS = ("fields", "dtypes", "null_fill")


@dataclass(frozen=True)
class SourceOptions:
    """What decides the rows; described at `lightning_fastio.convert.convert`."""

    kind: Kind = "auto"
    fn: Callable[[Any], Mapping[str, Any] | None] | None = None
    fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    dtypes: Mapping[str, str] | None = None
    null_fill: float | str | Mapping[str, float | str] | None = None
    size: tuple[int, int] | None = None
    resize: Literal["crop", "fit", "pad", "stretch"] = "crop"
    channels: Literal["RGB", "L", "keep"] = "RGB"
    background: tuple[int, int, int] = (255, 255, 255)
    encoded: bool = False
    ragged: bool = False
    labels: str | Path | None = None
    masks: str | Path | None = None
    classes: Sequence[str] | str | Path | None = None
    paths: bool = True
    max_pixels: int = 178_956_970
    tokenizer: str | None = None
    text_field: str = "text"
    documents: Literal["line", "file"] = "line"
    end_of_text: int | str | None = None
    shuffle_seed: int | None = None

    def changed(self) -> dict[str, Any]:
        """The options that are not at their default, as the manifest lists them."""
        values = {option.name: getattr(self, option.name) for option in fields_of(self)}
        changed = {
            option.name: values[option.name] for option in fields_of(self) if values[option.name] != option.default
        }
        if self.fn is not None:
            changed["fn"] = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return changed

    def refuse(self, kind: str, *names: str) -> None:
        """Raise for options that mean nothing to a source of this kind."""
        given = [name for name in names if name in self.changed()]
        if given:
            raise ConfigError(
                f"{', '.join(given)}: means nothing for {kind}; leave it out, or say what the source is by kind="
            )


@dataclass(frozen=True)
class RunOptions:
    """How to run a conversion; described at `lightning_fastio.convert.convert`."""

    on_error: Literal["stop", "skip"]
    max_skipped: int | None
    num_workers: int | None
    memory_bytes: int
    engine: Engine
    statistics: bool
    resume: bool
    overwrite: bool
    dry_run: bool
    progress: bool | None

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "process", "thread", "ray"):
            raise ConfigError(f"engine={self.engine!r}: expected 'auto', 'process', 'thread' or 'ray'")
        if self.on_error not in ("stop", "skip"):
            raise ConfigError(f"on_error={self.on_error!r}: expected 'stop' or 'skip'")
        if self.num_workers is not None and self.num_workers < 0:
            raise ConfigError(f"num_workers={self.num_workers}: expected 0 or more")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return ceil(cpu_allowance()) if self.num_workers is None else self.num_workers
