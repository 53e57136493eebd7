"""`FastIODataModule` and its three subclasses: files to loaders, for every stage."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Literal, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy.typing as npt
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_fastio._lightning import PlannedIndices, begin_epoch
from lightning_fastio.arguments import check_whole
from lightning_fastio.errors import ConfigError, ResumeError
from lightning_fastio.formats import open_reader
from lightning_fastio.formats.base import Reader
from lightning_fastio.loader import BatchLoader
from lightning_fastio.loader.fetch import Transform
from lightning_fastio.plan import Shuffle
from lightning_fastio.plan.rows import Split
from lightning_fastio.stages import Source, Stage, Stages

FieldNames: TypeAlias = list[str] | dict[str, str | list[str]] | None
"""Names; or new name to stored name, or to a list of stored names that are stacked into one matrix."""

_STAGES_OF: dict[str | None, tuple[Stage, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "val", "test", "predict"),
}


class FastIODataModule(LightningDataModule):
    """Loads .npy, .h5 and .parquet data for every stage of a Trainer.

    Subclasses override `open_reader` to bring a storage of their own, or `transform_batch` to change batches.

    Example:
        >>> data = FastIODataModule(train="digits.h5", val_split=0.2, batch_size=256)
        >>> trainer.fit(model, data)  # batches are {"image": (256, 8, 8), "label": (256,)}
    """

    storage_format: ClassVar[str | None] = None
    """The format that is read; None reads any."""

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        predict: Source = None,
        *,
        fields: FieldNames = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        val_split: int | float = 0,
        test_split: int | float = 0,
        split_seed: int = 0,
        split_by: str | None = None,
        stratify_by: str | None = None,
        shuffle: Shuffle = "auto",
        seed: int = 0,
        drop_last: bool = False,
        pad_last: bool = False,
        rows: str | Path | Sequence[int] | npt.NDArray[Any] | None = None,
        max_rows: int | None = None,
        weights: str | Sequence[float] | npt.NDArray[Any] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        worker_type: Literal["thread", "process"] = "thread",
        prefetch_factor: int = 2,
        multiprocessing_context: Literal["forkserver", "spawn", "fork"] = "forkserver",
        persistent_workers: bool = True,
        pin_memory: bool | Literal["auto"] = "auto",
        batch_as: Literal["dict", "tuple"] = "dict",
        transform: Callable[..., Any] | None = None,
        sample_transform: Callable[..., Any] | None = None,
        ragged: Literal["auto", "list", "pad", "error"] = "auto",
        widen_unsigned: bool = True,
        cache_bytes: int = 1 << 30,
        allow_changed_data: bool = False,
    ) -> None:
        """Set up; files are opened and checked in `setup`.

        Args:
            train: Training data: a file, a folder, a glob, a list of files, or a mapping of field to any of these.
            val: Validation data; or leave it out and give val_split.
            test: Test data; or leave it out and give test_split.
            predict: Data to predict on; the test data by default.
            fields: Fields to load, in this order; a mapping renames fields, and stacks a list of numeric ones into
                one matrix. All that can be loaded by default.
            batch_size: Rows of a training batch on one device.
            eval_batch_size: Rows of a batch in the other stages; batch_size by default, since that is known to fit.
            val_split: Part of the training data to validate on: a fraction below 1, or a number of rows.
            test_split: Part of the training data to test on, likewise.
            split_seed: Seed of the split; the order of training and the global seed do not change it.
            split_by: A field; rows with the same value (a patient, a document) stay on the same side of the split.
            stratify_by: A field whose values have the same share on each side of the split.
            shuffle: Order of training: global (uniform), block (decodes each block once), none, or auto.
            seed: Seed of the order and of random transforms.
            drop_last: Leave out the last training batches where they would not be full on every device.
            pad_last: Fill the last training batches with rows from the start of the epoch instead.
            rows: Training rows to use: row numbers, one bool for each row, or a .npy file with either.
            max_rows: Use this many rows of each source at most, for a quick trial.
            weights: Draw training rows with replacement: a field of weights, an array with one number for each row of
                the training data, or 'balanced:FIELD' for equally likely labels ('balanced' finds a field named label,
                y or target).
            num_workers: Threads or processes that read ahead; 0 reads in the training thread.
            worker_type: thread, or process for transforms in slow Python.
            prefetch_factor: Batches that each worker reads ahead.
            multiprocessing_context: How worker processes start.
            persistent_workers: Keep worker processes from one epoch to the next; threads cost nothing to start.
            pin_memory: Read into pinned memory; auto does when the Trainer runs on CUDA.
            batch_as: tuple gives the values in the order of the fields instead of a dict.
            transform: Takes and returns a batch, in every stage, before transform_batch. An argument generator or
                rng gets a generator that depends on (seed, epoch, batch) alone.
            sample_transform: The same for one sample (a dict of field to value) at a time, before transform.
            ragged: Rows of varying length: tensors if they turn out equal (auto), a list of tensors (list), padded
                with zeros to the longest of the batch (pad), or refused (error).
            widen_unsigned: Deliver uint16 as int32, uint32 and uint64 as int64, since torch has few operations for
                them.
            cache_bytes: Bytes of decoded blocks (compressed HDF5 chunks, Parquet row groups) kept at most.
            allow_changed_data: Resume although the data or the split is another one than in the checkpoint.
        """
        super().__init__()
        check_whole("batch_size", batch_size, least=1)
        if eval_batch_size is not None:
            check_whole("eval_batch_size", eval_batch_size, least=1)
        # Functions and arrays stay out: a checkpoint is loaded weights-only, which takes primitives alone.
        arguments = {"transform": transform, "sample_transform": sample_transform, "weights": weights, "rows": rows}
        self.save_hyperparameters(ignore=[name for name, value in arguments.items() if not _is_primitive(value)])
        self.hparams.update({name: _primitive(value) for name, value in self.hparams.items()})
        self.fields = fields
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.transform = transform
        self.allow_changed_data = allow_changed_data
        self.reader_options: dict[str, Any] = {
            "ragged": ragged,
            "widen_unsigned": widen_unsigned,
            "cache_bytes": cache_bytes,
        }
        self.stages = Stages(
            {"train": train, "val": val, "test": test, "predict": predict},
            Split(val_split, test_split, split_seed),
            open_source=self.open_reader,
            open_column=partial(self._open_column, train),
            split_by=split_by,
            stratify_by=stratify_by,
            max_rows=max_rows,
            rows=rows,
            weights=weights,
        )
        self._training: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "pad_last": pad_last}
        self._loading: dict[str, Any] = {
            "seed": seed,
            "num_workers": num_workers,
            "worker_type": worker_type,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "persistent_workers": persistent_workers,
            "batch_as": batch_as,
            "sample_transform": sample_transform,
            "allow_changed_data": allow_changed_data,
        }
        self._pin_memory: bool | Literal["auto"] = pin_memory
        # Loaders that are in use somewhere; one that nobody refers to any more has stopped by itself.
        self._loaders: WeakKeyDictionary[BatchLoader, ReferenceType[Trainer] | None] = WeakKeyDictionary()
        self._classes: list[str] | None = None
        self._said_order = False
        self._hide_empty_stages()

    # What a subclass may override

    def open_reader(self, source: Any) -> Reader:
        """Open a source. Override it to bring a storage of your own.

        Args:
            source: What was given as ``train``, ``val``, ``test`` or ``predict``.
        """
        return open_reader(source, self.fields, format=self.storage_format, **self.reader_options)

    def transform_batch(self, batch: Any, stage: Stage) -> Any:
        """Change a batch after it was read, in the reader threads or worker processes. Override it.

        An argument ``generator`` (torch.Generator) or ``rng`` (numpy.random.Generator), if you add one, depends on
        (seed, epoch, batch, rank) alone.

        Args:
            batch: Field name to values.
            stage: ``train``, ``val``, ``test`` or ``predict``.

        Returns:
            The batch for the training loop.
        """
        return batch

    # What Lightning calls

    def setup(self, stage: str | None = None) -> None:
        """Open and check every file that a stage needs, before any worker starts."""
        for each in _STAGES_OF[stage]:
            if self.stages.has(each):
                self.stages.rows(each)

    def train_dataloader(self) -> BatchLoader:
        """Batches to train on."""
        settings = {"shuffle": "none"} if getattr(self.trainer, "overfit_batches", 0) else {}
        loader = self._keep(self.new_train_loader(**settings))
        if self.trainer is not None:
            loader.on_epoch = partial(begin_epoch, self.trainer)
        if self._training["shuffle"] == "auto" and not self._said_order:
            self._said_order = True
            rank_zero_info(f"shuffle='auto' chose {loader.plan.shuffle!r}: {loader.plan.reason}")
        return loader

    def val_dataloader(self) -> BatchLoader:
        """Batches to validate on."""
        return self._eval_loader("val")

    def test_dataloader(self) -> BatchLoader:
        """Batches to test on."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """Batches to predict on."""
        loader = self._eval_loader("predict")
        loader.batch_sampler = PlannedIndices(loader)
        return loader

    def teardown(self, stage: str | None = None) -> None:
        """Stop workers and close files; a later stage opens them again."""
        # A Trainer may run inside a step of another one, on the same data: the other one goes on with its loaders.
        others = self._running_trainers()[:-1]
        for loader, owner in list(self._loaders.items()):
            if owner is None or owner() not in others:
                loader.close()
                del self._loaders[loader]
        if not self._loaders:
            self.stages.close()

    def state_dict(self) -> dict[str, Any]:
        """The split, so that a checkpoint is not used with another one."""
        return {"version": 1, "split": self.stages.split_fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the split is the one of the checkpoint.

        Raises:
            ResumeError: It is another one; the message has both fingerprints.
        """
        saved, now = state_dict["split"], self.stages.split_fingerprint
        stages = _STAGES_OF["fit" if self.trainer is None else _function_of(self.trainer)]
        # Data of its own can be tested on with any checkpoint.
        matters = "train" in stages or self.stages.draws_from_split(stages)
        if saved != now and matters and not self.allow_changed_data:
            raise ResumeError(
                f"the checkpoint was written with the split [{saved}], but now it is [{now}], so that rows trained on "
                "could be tested on: use the same split and data, or pass allow_changed_data=True"
            )

    # What measures and tunes

    def new_train_loader(self, **settings: Any) -> BatchLoader:
        """A loader of the training rows that whoever asks for it closes.

        Args:
            settings: Arguments of `BatchLoader`, ``reader`` included, in place of those of this module.
        """
        own = {"batch_size": self.batch_size, "weights": self.stages.weights(), **self._training}
        return self._new_loader("train", **{**own, **settings})

    def configure(self, *, batch_size: int | None = None, cache_bytes: int | None = None, **loading: Any) -> None:
        """Change how data is loaded, from the next loader on.

        Args:
            batch_size: Rows of a training batch.
            cache_bytes: Bytes of decoded blocks kept at most; files are opened again.
            loading: ``num_workers``, ``worker_type``, ``prefetch_factor`` or ``pin_memory``.

        Raises:
            ConfigError: There is no such setting.
        """
        unknown = set(loading) - {"num_workers", "worker_type", "prefetch_factor", "pin_memory"}
        if unknown:
            raise ConfigError(f"a loader cannot be configured with {sorted(unknown)}")
        self.hparams.update(loading)
        self._pin_memory = loading.pop("pin_memory", self._pin_memory)
        self._loading |= loading
        if batch_size is not None:
            self.batch_size = self.hparams["batch_size"] = batch_size
        if cache_bytes is not None:
            self.reader_options["cache_bytes"] = self.hparams["cache_bytes"] = cache_bytes
            self.stages.forget_readers()

    @property
    def has_transform(self) -> bool:
        """Whether code of the user runs on batches or samples."""
        overridden = type(self).transform_batch is not FastIODataModule.transform_batch
        return overridden or self.transform is not None or self._loading["sample_transform"] is not None

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, where the data was written with them: label ``i`` means ``classes[i]``."""
        if self._classes is None:
            self._classes = json.loads(self.stages.any_reader().metadata.get("classes", "null"))
        return self._classes

    def __getstate__(self) -> dict[str, Any]:
        # Loaders stay in the process that iterates them; strategies that spawn processes send the rest.
        return {name: value for name, value in vars(self).items() if name != "_loaders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaders=WeakKeyDictionary())

    def _hide_empty_stages(self) -> None:
        """Let Lightning see no loader for a stage without data, as in a module that does not define it."""
        stages: tuple[Stage, ...] = ("train", "val", "test", "predict")
        for stage in stages:
            name = f"{stage}_dataloader"
            if not self.stages.has(stage) and getattr(type(self), name) is getattr(FastIODataModule, name):
                setattr(self, name, MethodType(getattr(LightningDataModule, name), self))

    def _eval_loader(self, stage: Stage) -> BatchLoader:
        batch_size = self.eval_batch_size or self.batch_size
        return self._keep(self._new_loader(stage, batch_size=batch_size, shuffle="none"))

    def _keep(self, loader: BatchLoader) -> BatchLoader:
        self._loaders[loader] = None if self.trainer is None else ref(self.trainer)
        return loader

    def _running_trainers(self) -> list[Trainer]:
        """Trainers that are in the middle of a run on loaders of this module, the outermost one first."""
        # `self.trainer` is the one that came last, also when its run is over and that of another goes on.
        owners = [*(owner() for owner in self._loaders.values() if owner is not None), self.trainer]
        return [owner for owner in dict.fromkeys(owners) if owner is not None and owner.state.status == "running"]

    def _new_loader(self, stage: Stage, **settings: Any) -> BatchLoader:
        transforms: list[Transform] = [] if self.transform is None else [self.transform]
        if type(self).transform_batch is not FastIODataModule.transform_batch:
            transforms.append(_StageTransform(self, stage))
        if self.trainer is not None:
            # Strategies that divide a model over devices give the same rows to several of them.
            ranks = self.trainer.distributed_sampler_kwargs
            if ranks:
                settings |= {"rank": ranks["rank"], "world_size": ranks["num_replicas"]}
            if self._pin_memory == "auto":
                settings.setdefault("pin_memory", self.trainer.strategy.root_device.type == "cuda")
        settings = {"pin_memory": self._pin_memory, "transform": transforms, **self._loading, **settings}
        settings.setdefault("reader", self.stages.reader(stage))
        return BatchLoader(rows=self.stages.rows(stage), **settings)

    def _open_column(self, source: Source, field: str) -> Reader:
        """The training data with one field, so that nothing else is read."""
        if type(self).open_reader is FastIODataModule.open_reader and source is not None:
            stored = self.fields.get(field, field) if isinstance(self.fields, dict) else field
            return open_reader(source, {field: stored}, format=self.storage_format, **self.reader_options)
        reader = self.stages.reader("train")
        if field not in reader.schema:
            raise ConfigError(f"the reader has no field {field!r}; it has {list(reader.schema)}")
        return reader


class NumpyDataModule(FastIODataModule):
    """Loads .npy files, folders of them, and .npz archives.

    Example:
        >>> data = NumpyDataModule(train={"x": "images.npy", "y": "labels.npy"}, val_split=0.1)
        >>> tokens = NumpyDataModule(train="tokens.npy", window=1025, stride=1024)
    """

    storage_format = "numpy"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        predict: Source = None,
        *,
        window: int | None = None,
        stride: int | None = None,
        sparse: bool = False,
        **kwargs: Any,
    ) -> None:
        """Set up; files are opened and checked in `setup`.

        Args:
            train: Training data: a .npy or .npz file, a folder, a glob, a list of files, or a mapping of field to
                any of these.
            val: Validation data; or leave it out and give val_split.
            test: Test data; or leave it out and give test_split.
            predict: Data to predict on; the test data by default.
            window: Length of windows along the first axis, each of which is one sample; never across files.
            stride: Distance between the starts of windows; window by default.
            sparse: Deliver SciPy's sparse .npz as sparse CSR tensors instead of dense rows.
            kwargs: See `FastIODataModule`.
        """
        super().__init__(train, val, test, predict, **kwargs)
        self.reader_options |= {"window": window, "stride": stride, "sparse": sparse}


class HDF5DataModule(FastIODataModule):
    """Loads HDF5 files (.h5, .hdf5, NetCDF-4, MATLAB v7.3, AnnData); fields name datasets.

    Example:
        >>> data = HDF5DataModule(train="train-*.h5", fields=["images", "meta/label"], val_split=0.1)
    """

    storage_format = "hdf5"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        predict: Source = None,
        *,
        window: int | None = None,
        stride: int | None = None,
        sparse: bool = False,
        locking: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Set up; files are opened and checked in `setup`.

        Args:
            train: Training data: a file, a folder, a glob, or a list of files.
            val: Validation data; or leave it out and give val_split.
            test: Test data; or leave it out and give test_split.
            predict: Data to predict on; the test data by default.
            window: Length of windows along the first axis, each of which is one sample; never across files.
            stride: Distance between the starts of windows; window by default.
            sparse: Deliver CSR groups as sparse CSR tensors instead of dense rows.
            locking: Whether HDF5 locks files while they are open; False for network drives that cannot lock.
            kwargs: See `FastIODataModule`.
        """
        super().__init__(train, val, test, predict, **kwargs)
        self.reader_options |= {"window": window, "stride": stride, "sparse": sparse, "locking": locking}


class ParquetDataModule(FastIODataModule):
    """Loads Parquet files; fields name columns.

    Example:
        >>> data = ParquetDataModule(train="table/", fields={"x": ["f0", "f1"], "y": "label"}, val_split=0.1)
    """

    storage_format = "parquet"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        predict: Source = None,
        *,
        null_fill: int | float | dict[str, int | float] | None = None,
        filters: list[list[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Set up; files are opened and checked in `setup`.

        Args:
            train: Training data: a file, a folder (Hive partitions too), a glob, or a list of files.
            val: Validation data; or leave it out and give val_split.
            test: Test data; or leave it out and give test_split.
            predict: Data to predict on; the test data by default.
            null_fill: What nulls become: one number, or one for each field. Nulls are refused by default.
            filters: Rows to keep, as [[column, operator, value], ...], all of which must hold.
            kwargs: See `FastIODataModule`.
        """
        super().__init__(train, val, test, predict, **kwargs)
        self.reader_options |= {"null_fill": null_fill, "filters": filters}


class _StageTransform:
    """`transform_batch` of a data module for one stage, in a form that can be sent to another process."""

    def __init__(self, module: FastIODataModule, stage: Stage) -> None:
        self._module = module
        self._stage = stage
        # The fetcher looks here for the arguments generator and rng.
        self.__signature__ = inspect.signature(module.transform_batch)

    def __call__(self, batch: Any, **generators: Any) -> Any:
        return self._module.transform_batch(batch, self._stage, **generators)

    def __getstate__(self) -> dict[str, Any]:
        # The Trainer, opened data and loaders stay here; `transform_batch` has no use for them. Classes travel.
        stays = {"stages", "_loaders"} | {f"{stage}_dataloader" for stage in _STAGES_OF[None]}
        module = object.__new__(type(self._module))
        module.__dict__.update({name: value for name, value in vars(self._module).items() if name not in stays})
        module.__dict__.update(trainer=None, _classes=self._module.classes)
        return {**self.__dict__, "_module": module}


def _function_of(trainer: Trainer) -> str:
    """``fit``, ``validate``, ``test`` or ``predict``."""
    return "fit" if trainer.state.fn is None else trainer.state.fn.value


def _is_primitive(value: Any) -> bool:
    return value is None or isinstance(value, str | Path)


def _primitive(value: Any) -> Any:
    """The same value in types that a weights-only checkpoint can hold."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _primitive(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_primitive(item) for item in value]
    return value
