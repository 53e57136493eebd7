"""Failure cases of converters: what happened to people, and what is right instead. Each for all three formats."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_fastio.convert import convert
from lightning_fastio.convert.manifest import unescape_name
from lightning_fastio.errors import ConfigError, CorruptFileError
from tests.convert.pictures import (
    DESTINATIONS,
    classes_of,
    destination_options,
    encode,
    noise,
    plain,
    read_all,
    save,
)

pytestmark = pytest.mark.parametrize("name", DESTINATIONS)

RED = np.full((8, 8, 3), (255, 0, 0), np.uint8)


def run(source: Path, tmp_path: Path, name: str, **options):
    manifest = convert(source, tmp_path / name, num_workers=0, **destination_options(name), **options)
    return manifest, read_all(tmp_path / name)


def test_modes_of_one_red_square_become_equal_rgb(tmp_path, name):
    """V2: palette numbers are no grey levels, CMYK is no RGB."""
    folder = tmp_path / "in"
    folder.mkdir()
    red = Image.fromarray(RED)
    (folder / "rgb.png").write_bytes(encode(red, "PNG"))
    (folder / "palette.png").write_bytes(encode(red.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"))
    (folder / "palette.gif").write_bytes(encode(red.convert("P"), "GIF"))
    (folder / "cmyk.jpg").write_bytes(encode(red.convert("CMYK"), "JPEG", quality=95))
    (folder / "cmyk.tif").write_bytes(encode(red.convert("CMYK"), "TIFF"))
    (folder / "ycbcr.jpg").write_bytes(encode(red, "JPEG", quality=95))
    (folder / "alpha.png").write_bytes(encode(red.convert("RGBA"), "PNG"))
    _, rows = run(folder, tmp_path, name)
    assert rows["image"].shape == (7, 8, 8, 3)
    for path, image in zip(rows["path"], rows["image"], strict=True):
        assert np.abs(image.astype(int) - RED).max() <= 2, path


def test_grey_modes_of_one_red_square_become_its_luma(tmp_path, name):
    """V2: grey has no colour to give back; it is repeated, and 1-bit gives black and white."""
    folder = tmp_path / "in"
    folder.mkdir()
    grey = Image.fromarray(RED).convert("L")
    (folder / "l.png").write_bytes(encode(grey, "PNG"))
    (folder / "la.png").write_bytes(encode(grey.convert("LA"), "PNG"))
    (folder / "one-bit.png").write_bytes(encode(Image.new("1", (8, 8), 1), "PNG"))
    _, rows = run(folder, tmp_path, name)
    assert rows["path"] == ["l.png", "la.png", "one-bit.png"]
    np.testing.assert_array_equal(rows["image"][:2], np.full((2, 8, 8, 3), 76))
    np.testing.assert_array_equal(rows["image"][2], np.full((8, 8, 3), 255))


def test_exif_rotation_is_applied_before_anything_else(tmp_path, name):
    """V4: a 4 x 2 JPEG with orientation 6 is stored 4 high and 2 wide, its marked corner in the right place."""
    folder = tmp_path / "in"
    folder.mkdir()
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "phone.jpg").write_bytes(encode(Image.fromarray(pixels), "JPEG", exif=exif, quality=95))
    _, rows = run(folder, tmp_path, name)
    [image] = rows["image"]
    assert image.shape == (32, 16, 3)
    # Orientation 6 is shown by turning clockwise: the top left corner goes to the top right.
    assert image[:8, 8:].min() > 200
    assert image[8:].max() < 55
    assert image[:8, :8].max() < 55


def broken_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    for index in range(7):
        save(folder / ("cat" if index < 4 else "dog") / f"{index}.png", noise(index))
    whole = encode(Image.fromarray(noise(7, (40, 40, 3))), "JPEG")
    (folder / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "empty.png").write_bytes(b"")
    (folder / "dog" / "page.jpg").write_bytes(b"<html>404 Not Found</html>")
    return folder


def test_broken_images_are_skipped_and_listed(tmp_path, name):
    """V5, H4: seven rows with right labels, no row of zeros, three listed with the reason."""
    manifest, rows = run(broken_folder(tmp_path), tmp_path, name, on_error="skip", size=(6, 8), resize="stretch")
    np.testing.assert_array_equal(rows["image"], np.stack([noise(index) for index in range(7)]))
    assert rows["label"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert [entry.item for entry in manifest.skipped] == ["cat/cut.jpg", "dog/empty.png", "dog/page.jpg"]
    reasons = [entry.reason for entry in manifest.skipped]
    assert "incomplete" in reasons[0]
    assert "empty" in reasons[1]
    assert "not a picture" in reasons[2]
    assert "<html>" in reasons[2]


def test_a_broken_image_stops_by_default_and_leaves_nothing(tmp_path, name):
    """V5: the path is named and no output is left."""
    folder = broken_folder(tmp_path)
    with pytest.raises(CorruptFileError, match=r"cat/cut\.jpg.*on_error='skip'"):
        run(folder, tmp_path, name, size=(6, 8))
    assert os.listdir(tmp_path) == ["in"]


def test_too_many_skips_stop(tmp_path, name):
    """V5: skipping has a limit."""
    with pytest.raises(CorruptFileError, match=r"more than max_skipped=2"):
        run(broken_folder(tmp_path), tmp_path, name, on_error="skip", max_skipped=2, size=(6, 8))
    assert os.listdir(tmp_path) == ["in"]


def test_too_large_images_fail_alone_and_the_global_limit_stays(tmp_path, name):
    """V6: one picture above the limit is listed, the rest converted, Pillow's own limit unchanged."""
    folder = tmp_path / "in"
    save(folder / "large.png", noise(0, (20, 20, 3)))
    small = save(folder / "small.png", noise(1, (10, 10, 3)))
    limit = Image.MAX_IMAGE_PIXELS
    manifest, rows = run(folder, tmp_path, name, max_pixels=100, on_error="skip")
    np.testing.assert_array_equal(rows["image"], small[None])
    assert [entry.item for entry in manifest.skipped] == ["large.png"]
    assert "too large: 20 x 20" in manifest.skipped[0].reason
    assert limit == Image.MAX_IMAGE_PIXELS


def test_pairs_are_matched_by_stem_and_not_by_listing_order(tmp_path, name, monkeypatch):
    """V8: mixed suffixes, files made in any order, one mask missing, a listing in random order."""
    images, masks = tmp_path / "images", tmp_path / "masks"
    stems = [f"{index}" for index in range(12)]
    random.Random(3).shuffle(stems)
    for stem in stems:
        # Lossless: the suffix is what differs.
        save(images / f"{stem}{'.png' if int(stem) % 2 else '.bmp'}", noise(int(stem)))
    for stem in reversed(stems):
        if stem != "5":
            save(masks / f"{stem}{'.tif' if int(stem) % 3 else '.png'}", np.full((6, 8), int(stem), np.uint8))
    manifest, rows = run(images, tmp_path, name, masks=masks, on_error="skip")
    expected = [index for index in range(12) if index != 5]
    np.testing.assert_array_equal(rows["image"], np.stack([noise(index) for index in expected]))
    assert rows["mask"][:, 0, 0].tolist() == expected
    assert [entry.item for entry in manifest.skipped] == ["5.png"]
    assert "no mask" in manifest.skipped[0].reason
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda *args, **kwargs: ((root, dirs, files[::-1]) for root, dirs, files in walk(*args, **kwargs))
    )
    again, rows_again = run(images, tmp_path, "again-" + name, masks=masks, on_error="skip")
    assert rows_again["path"] == rows["path"]
    assert list(again.shards[0].files.values()) == list(manifest.shards[0].files.values())


def test_names_that_are_not_utf_8_are_stored_reversibly(tmp_path, name):
    """V11: spaces, emoji and a byte 0xFF."""
    folder = tmp_path / "in"
    folder.mkdir()
    names = [b"a b.png", "\N{GRINNING FACE}.png".encode(), b"x\xff.png", b"y\\xff.png"]
    for index, raw in enumerate(names):
        Path(os.fsdecode(os.path.join(os.fsencode(folder), raw))).write_bytes(
            encode(Image.fromarray(noise(index)), "PNG")
        )
    _, rows = run(folder, tmp_path, name)
    stored = {os.fsencode(unescape_name(path)): image for path, image in zip(rows["path"], rows["image"], strict=True)}
    assert set(stored) == set(names)
    for index, raw in enumerate(names):
        np.testing.assert_array_equal(stored[raw], noise(index))


def test_size_is_height_and_width(tmp_path, name):
    """V12: 176 x 144 and 100 x 50 with size=(144, 176) all become (144, 176, 3)."""
    folder = tmp_path / "in"
    wide = save(folder / "a.png", noise(0, (144, 176, 3)))
    save(folder / "b.png", noise(1, (50, 100, 3)))
    manifest, rows = run(folder, tmp_path, name, size=(144, 176))
    assert rows["image"].shape == (2, 144, 176, 3)
    np.testing.assert_array_equal(rows["image"][0], wide)
    assert manifest.fields["image"] == "uint8[144, 176, 3]"


def test_mixed_sizes_without_size_are_refused_early(tmp_path, name):
    """V12: the message lists two shapes and what to do; nothing is left."""
    folder = tmp_path / "in"
    save(folder / "a.png", noise(0, (144, 176, 3)))
    save(folder / "b.png", noise(1, (50, 100, 3)))
    with pytest.raises(ConfigError, match=r"\(144, 176\).*\(50, 100\).*size=.*ragged=True"):
        run(folder, tmp_path, name)
    assert os.listdir(tmp_path) == ["in"]


def test_ragged_images_keep_their_sizes(tmp_path, name):
    """V12: the explicit way to store mixed sizes."""
    folder = tmp_path / "in"
    pixels = [save(folder / f"{index}.png", noise(index, (4 + index, 9 - index, 3))) for index in range(3)]
    _, rows = run(folder, tmp_path, name, ragged=True)
    for flat, shape, expected in zip(rows["image"], rows["shape"], pixels, strict=True):
        np.testing.assert_array_equal(flat.reshape(shape), expected)


def test_equal_base_names_in_two_folders_are_two_rows(tmp_path, name):
    """V13: the key is the relative path."""
    folder = tmp_path / "in"
    one, two = save(folder / "a" / "1.png", noise(1)), save(folder / "b" / "1.png", noise(2))
    _, rows = run(folder, tmp_path, name)
    assert rows["path"] == ["a/1.png", "b/1.png"]
    np.testing.assert_array_equal(rows["image"], np.stack([one, two]))
    assert rows["label"].tolist() == [0, 1]
    assert json.loads(classes_of(tmp_path / name)) == ["a", "b"]


def test_types_come_from_all_records(tmp_path, name):
    """V14: a key that is null at first and one that appears late are both in the output."""
    records = [
        {"text": f"t{index}", "lang": None if index < 50 else "de", **({"q": index / 2} if index >= 60 else {})}
        for index in range(100)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, records)))
    manifest, rows = run(source, tmp_path, name)
    assert rows["text"] == [f"t{index}" for index in range(100)]
    assert rows["lang"] == [""] * 50 + ["de"] * 50
    assert np.isnan(rows["q"][:60]).all()
    np.testing.assert_array_equal(rows["q"][60:], np.arange(60, 100) / 2)
    assert manifest.statistics["q"]["nulls"] == 60


def test_text_with_nul_fails_with_the_item_named(tmp_path, name):
    """H13: a NUL would end the string early in HDF5."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b\\u0000c"}\n')
    with pytest.raises(CorruptFileError, match=r"in\.jsonl:2.*NUL"):
        run(source, tmp_path, name)


def test_reconverting_leaves_open_readers_their_data(tmp_path, name):
    """N12: written beside and renamed, so that who has the old data open reads the old data."""
    from lightning_fastio import open_reader

    folder = tmp_path / "in"
    old = save(folder / "a.png", noise(0))
    run(folder, tmp_path, name)
    reader = open_reader(tmp_path / name)
    reader.read([0])
    new = save(folder / "a.png", noise(1))
    run(folder, tmp_path, name, overwrite=True)
    np.testing.assert_array_equal(plain(reader.read([0])["image"])[0], old)
    reader.close()
    np.testing.assert_array_equal(read_all(tmp_path / name)["image"][0], new)


def test_chunks_lie_along_the_sample_axis(tmp_path, name):
    """H17, P9: a chunk or row group holds whole samples."""
    folder = tmp_path / "in"
    for index in range(64):
        save(folder / f"{index}.png", np.full((16, 16, 3), index, np.uint8))
    _, rows = run(folder, tmp_path, name, paths=False)
    np.testing.assert_array_equal(rows["image"][:, 0, 0, 0], np.arange(64))
    if name.endswith(".h5"):
        import h5py

        with h5py.File(tmp_path / name) as file:
            assert file["image"].compression is not None
            assert file["image"].chunks[1:] == (16, 16, 3)


def test_half_floats_are_cast_in_numpy(tmp_path, name):
    """H21: bit by bit what NumPy makes of it."""
    values = np.random.default_rng(0).normal(size=1000)
    np.save(tmp_path / "x.npy", values)
    _, rows = run(tmp_path / "x.npy", tmp_path, name, dtypes={"x": "float16"})
    assert rows["x"].tobytes() == values.astype(np.float16).tobytes()
