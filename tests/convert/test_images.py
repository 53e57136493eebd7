"""Folders of pictures, labels, masks, tar shards and tables of encoded pictures."""

from __future__ import annotations

import io
import json
import logging
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lightning_fastio import HDF5DataModule, NumpyDataModule, ParquetDataModule, open_reader
from lightning_fastio.convert import convert, verify
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError
from tests.convert.pictures import (
    DESTINATIONS,
    classes_of,
    destination_options,
    encode,
    noise,
    read_all,
    save,
)

every_format = pytest.mark.parametrize("name", DESTINATIONS)


@pytest.mark.parametrize("format", ["numpy", "hdf5", "parquet"])
def test_splits_become_sub_folders_with_one_class_mapping(tmp_path, format):
    folder = tmp_path / "in"
    for split, classes in {"train": ["b", "a"], "val": ["b"], "test": ["a"]}.items():
        for label in classes:
            for index in range(3):
                save(folder / split / label / f"{index}.png", noise(ord(label) + index))
    manifest = convert(folder, tmp_path / "out", format=format, num_workers=0)
    assert manifest.splits == {"train": 6, "val": 3, "test": 3}
    assert manifest.classes == ["a", "b"]
    train, val, test = (read_all(tmp_path / "out" / split) for split in ("train", "val", "test"))
    assert train["path"] == ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png", "b/2.png"]
    assert train["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert val["label"].tolist() == [1, 1, 1]
    assert test["label"].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(val["image"][2], noise(ord("b") + 2))
    assert all(json.loads(classes_of(tmp_path / "out" / split)) == ["a", "b"] for split in manifest.splits)
    verify(tmp_path / "out")


def test_splits_do_not_fit_into_one_file(tmp_path):
    save(tmp_path / "in" / "train" / "a" / "0.png", noise(0))
    save(tmp_path / "in" / "val" / "a" / "0.png", noise(0))
    with pytest.raises(ConfigError, match=r"'train', 'val'.*give a folder"):
        convert(tmp_path / "in", tmp_path / "out.h5", num_workers=0)


@every_format
def test_the_data_module_knows_the_classes(tmp_path, name):
    for label in "ab":
        save(tmp_path / "in" / label / "0.png", noise(0))
    convert(tmp_path / "in", tmp_path / name, num_workers=0, **destination_options(name))
    module = {"out": NumpyDataModule, "out.h5": HDF5DataModule, "out.parquet": ParquetDataModule}[name](
        train=tmp_path / name, batch_size=2
    )
    module.setup("fit")
    assert module.classes == ["a", "b"]
    module.teardown("fit")


@every_format
def test_classes_of_earlier_data_are_reused(tmp_path, name):
    for label in "abc":
        save(tmp_path / "train" / label / "0.png", noise(0))
    for label in "cb":
        save(tmp_path / "val" / label / "0.png", noise(0))
    convert(tmp_path / "train", tmp_path / name, num_workers=0, **destination_options(name))
    manifest = convert(tmp_path / "val", tmp_path / "val.h5", classes=tmp_path / name, num_workers=0)
    assert manifest.classes == ["a", "b", "c"]
    assert read_all(tmp_path / "val.h5")["label"].tolist() == [1, 2]
    save(tmp_path / "val" / "new" / "0.png", noise(0))
    with pytest.raises(ConfigError, match=r"classes \['new'\] are not in the mapping"):
        convert(tmp_path / "val", tmp_path / "other.h5", classes=tmp_path / name, num_workers=0)


@every_format
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_flat_folder_with_a_table_of_labels(tmp_path, name, suffix):
    folder = tmp_path / "in"
    for index in range(4):
        save(folder / f"{index}.png", noise(index))
    rows = [("2.png", "dog", 2, 0.5), ("0.png", "cat", 0, 1.5), ("3", "dog", 3, 2.5), ("9.png", "cat", 9, 3.5)]
    keys = ("file_name", "label", "number", "weight")
    labels = tmp_path / f"labels{suffix}"
    if suffix == ".jsonl":
        labels.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    else:
        separator = "\t" if suffix == ".tsv" else ","
        labels.write_text("\n".join(separator.join(map(str, row)) for row in (keys, *rows)))
    with pytest.raises(CorruptFileError, match=r"1\.png: no row in"):
        convert(folder, tmp_path / name, labels=labels, num_workers=0, **destination_options(name))
    options = {"on_error": "skip", **destination_options(name)}
    manifest = convert(folder, tmp_path / name, labels=labels, num_workers=0, **options)
    found = read_all(tmp_path / name)
    assert found["path"] == ["0.png", "2.png", "3.png"]
    assert found["label"].tolist() == [0, 1, 1]
    assert found["number"].tolist() == [0, 2, 3]
    assert found["weight"].tolist() == [1.5, 0.5, 2.5]
    assert manifest.classes == ["cat", "dog"]
    assert [entry.item for entry in manifest.skipped] == ["1.png", "9.png"]


def test_metadata_beside_the_pictures_is_found(tmp_path):
    save(tmp_path / "in" / "0.png", noise(0))
    (tmp_path / "in" / "metadata.jsonl").write_text('{"file_name": "0.png", "caption": "a cat", "box": [1, 2]}')
    convert(tmp_path / "in", tmp_path / "out.parquet", num_workers=0)
    rows = read_all(tmp_path / "out.parquet")
    assert rows["caption"] == ["a cat"]
    np.testing.assert_array_equal(rows["box"], np.array([[1, 2]]))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("path,label\n0.png,1\n0.png,2\n", ConfigError, "occurs in rows 1 and 2"),
        ("path,label\n0.png,\n", FormatError, "column label: no value for 1 of 1"),
        ("path,label\n", FormatError, "no rows"),
    ],
)
def test_tables_of_labels_that_leave_something_open(tmp_path, text, error, message):
    save(tmp_path / "in" / "0.png", noise(0))
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(error, match=message):
        convert(tmp_path / "in", tmp_path / "out.h5", labels=tmp_path / "labels.csv", num_workers=0)
    with pytest.raises(FileAccessError, match="no such file of labels"):
        convert(tmp_path / "in", tmp_path / "out.h5", labels=tmp_path / "missing.csv", num_workers=0)


@every_format
def test_masks_are_resized_without_mixing_classes(tmp_path, name):
    image = save(tmp_path / "images" / "a.png", noise(0, (8, 8, 3)))
    mask = np.zeros((8, 8), np.uint8)
    mask[:, 4:] = 200
    palette = Image.fromarray(mask).convert("P")
    palette.putdata(mask.reshape(-1).tolist())
    (tmp_path / "masks").mkdir()
    palette.save(tmp_path / "masks" / "a.png")
    convert(
        tmp_path / "images",
        tmp_path / name,
        masks=tmp_path / "masks",
        size=(4, 4),
        resize="stretch",
        num_workers=0,
        **destination_options(name),
    )
    rows = read_all(tmp_path / name)
    assert rows["mask"].dtype == np.uint8
    np.testing.assert_array_equal(rows["mask"][0], np.repeat([[0, 0, 200, 200]], 4, axis=0))
    expected = Image.fromarray(image).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(rows["image"][0], np.asarray(expected))


def test_masks_of_another_size_or_of_colours_are_refused(tmp_path):
    save(tmp_path / "images" / "a.png", noise(0))
    save(tmp_path / "masks" / "a.png", np.zeros((3, 3), np.uint8))
    with pytest.raises(CorruptFileError, match=r"a\.png: the image is \(6, 8\), its mask \(3, 3\)"):
        convert(tmp_path / "images", tmp_path / "out.h5", masks=tmp_path / "masks", num_workers=0)
    save(tmp_path / "masks" / "a.png", noise(0))
    with pytest.raises(CorruptFileError, match=r"its mask: a mask has one channel"):
        convert(tmp_path / "images", tmp_path / "out.h5", masks=tmp_path / "masks", num_workers=0)
    save(tmp_path / "masks" / "a.tif", np.zeros((6, 8), np.uint8))
    with pytest.raises(ConfigError, match="same stem"):
        convert(tmp_path / "images", tmp_path / "out.h5", masks=tmp_path / "masks", num_workers=0)


@every_format
def test_encoded_pictures_keep_their_bytes(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    data = [encode(Image.fromarray(noise(index, (9 + index, 7, 3))), "JPEG") for index in range(3)]
    for index, content in enumerate(data):
        (folder / f"{index}.jpg").write_bytes(content)
    (folder / "cut.jpg").write_bytes(data[0][:-200])
    options = {"on_error": "skip", **destination_options(name)}
    manifest = convert(folder, tmp_path / name, encoded=True, num_workers=0, **options)
    rows = read_all(tmp_path / name)
    assert [bytes(content) for content in rows["image"]] == data
    assert [entry.item for entry in manifest.skipped] == ["cut.jpg"]


@every_format
def test_shuffled_pictures_keep_their_labels(tmp_path, name):
    folder = tmp_path / "in"
    for index in range(40):
        save(folder / f"{index % 4}" / f"{index}.png", np.full((4, 4, 3), index, np.uint8))
    convert(folder, tmp_path / name, shuffle_seed=7, num_workers=0, **destination_options(name))
    rows = read_all(tmp_path / name)
    found = rows["image"][:, 0, 0, 0]
    assert found.tolist() != sorted(found.tolist(), key=lambda index: (index % 4, index))
    assert sorted(found.tolist()) == list(range(40))
    np.testing.assert_array_equal(rows["label"], found % 4)
    assert rows["path"] == [f"{index % 4}/{index}.png" for index in found]


def write_tar(path, samples) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for member, data in samples:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@every_format
def test_webdataset_shards(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    for shard in range(2):
        write_tar(
            folder / f"{shard:06d}.tar",
            [
                (f"s/{shard}{index}.{suffix}", data)
                for index in range(3)
                for suffix, data in (
                    ("png", encode(Image.fromarray(noise(shard * 3 + index)), "PNG")),
                    ("cls", str(index).encode()),
                    ("txt", f"caption {shard}{index}".encode()),
                )
                if (shard, index, suffix) != (1, 2, "cls")
            ],
        )
    with pytest.raises(CorruptFileError, match=r"000001\.tar/s/12: no label"):
        convert(folder, tmp_path / name, num_workers=0, **destination_options(name))
    manifest = convert(
        folder,
        tmp_path / name,
        classes=["x", "y", "z"],
        on_error="skip",
        num_workers=0,
        **destination_options(name),
    )
    rows = read_all(tmp_path / name)
    assert rows["path"] == ["s/00", "s/01", "s/02", "s/10", "s/11"]
    np.testing.assert_array_equal(rows["image"], np.stack([noise(index) for index in range(5)]))
    assert rows["label"].tolist() == [0, 1, 2, 0, 1]
    assert rows["text"] == [f"caption {key}" for key in ("00", "01", "02", "10", "11")]
    assert manifest.classes == ["x", "y", "z"]


def test_tar_files_that_cannot_be_indexed(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.png", encode(Image.fromarray(noise(0, (40, 40, 3))), "PNG"))])
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:1500])
    with pytest.raises(CorruptFileError, match="incomplete"):
        convert(tmp_path / "cut.tar", tmp_path / "out.h5", num_workers=0)
    write_tar(tmp_path / "b.tar.gz", [("a.png", b"")])
    (tmp_path / "b.tar.gz").rename(tmp_path / "b.tar")
    with pytest.raises(ConfigError, match="gunzip"):
        convert(tmp_path / "b.tar", tmp_path / "out.h5", num_workers=0)


@every_format
def test_tables_of_encoded_pictures(tmp_path, name):
    features = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["no", "yes"]}}
    schema = pa.schema(
        [
            ("img", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("label", pa.int64()),
            ("caption", pa.string()),
        ],
        {b"huggingface": json.dumps({"info": {"features": features}}).encode()},
    )
    data = [encode(Image.fromarray(noise(index)), "PNG") for index in range(150)]
    table = pa.table(
        {
            "img": [{"bytes": content, "path": f"{index}.png"} for index, content in enumerate(data)],
            "label": [index % 2 for index in range(150)],
            "caption": [f"c{index}" for index in range(150)],
        },
        schema,
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=100)
    manifest = convert(tmp_path / "in.parquet", tmp_path / name, num_workers=0, **destination_options(name))
    rows = read_all(tmp_path / name)
    np.testing.assert_array_equal(rows["image"], np.stack([noise(index) for index in range(150)]))
    assert rows["label"].tolist() == [index % 2 for index in range(150)]
    assert rows["caption"] == [f"c{index}" for index in range(150)]
    assert rows["path"] == [f"{index}.png" for index in range(150)]
    assert manifest.classes == ["no", "yes"]


def test_tables_that_only_name_their_pictures_are_refused(tmp_path):
    rows = [{"bytes": None, "path": "a.png"}]
    table = pa.table({"image": pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(FormatError, match=r"row 0: the bytes of the picture are not in the file.*'a\.png'"):
        convert(tmp_path / "in.parquet", tmp_path / "out.h5", num_workers=0)


def test_folders_without_pictures_and_with_loose_ones(tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no pictures"):
        convert(tmp_path / "empty", tmp_path / "out.h5", kind="images")
    save(tmp_path / "in" / "a" / "0.png", noise(0))
    save(tmp_path / "in" / "1.png", noise(1))
    save(tmp_path / "in" / ".hidden.png", noise(2))
    with caplog.at_level(logging.WARNING, "lightning_fastio"):
        convert(tmp_path / "in", tmp_path / "out.h5", num_workers=0)
    assert "no labels are made of the folders" in caplog.text
    rows = read_all(tmp_path / "out.h5")
    assert rows["path"] == ["1.png", "a/0.png"]
    assert "label" not in rows


def test_fit_gives_each_picture_its_own_size(tmp_path):
    save(tmp_path / "in" / "a.png", noise(0, (20, 40, 3)))
    save(tmp_path / "in" / "b.png", noise(1, (40, 20, 3)))
    convert(tmp_path / "in", tmp_path / "out.parquet", size=(10, 10), resize="fit", num_workers=0)
    reader = open_reader(tmp_path / "out.parquet")
    assert reader.read([0, 1])["shape"].tolist() == [[5, 10, 3], [10, 5, 3]]
    reader.close()
