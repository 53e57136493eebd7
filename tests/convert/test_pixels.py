"""The rules by which a picture becomes an array."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from lightning_fastio.convert.pixels import ImageRules, decode_image, decode_mask, shown_size
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError
from tests.convert.pictures import encode, noise

KEEP = ImageRules(channels="keep")
GREY = ImageRules(channels="L")


def test_transparency_is_composited_on_the_background():
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 0] = 255
    pixels[0, :, 3] = (0, 128, 255)
    data = encode(Image.fromarray(pixels), "PNG")
    on_white = decode_image(data, ImageRules())
    assert on_white.tolist() == [[[255, 255, 255], [255, 127, 127], [255, 0, 0]]]
    on_blue = decode_image(data, ImageRules(background=(0, 0, 255)))
    assert on_blue.tolist() == [[[0, 0, 255], [128, 0, 127], [255, 0, 0]]]
    np.testing.assert_array_equal(decode_image(data, KEEP), pixels)


def test_a_transparent_colour_of_a_palette_is_composited():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1])
    data = encode(image, "PNG", transparency=1)
    assert decode_image(data, ImageRules()).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert decode_image(data, KEEP).shape == (1, 2, 4)


def test_sixteen_bits_are_scaled_and_never_clipped():
    wide = np.array([[0, 128, 256, 257, 32768, 65535]], np.uint16)
    data = encode(Image.fromarray(wide), "PNG")
    expected = np.round(wide.astype(float) / 257).astype(np.uint8)
    np.testing.assert_array_equal(decode_image(data, GREY)[..., 0], expected)
    np.testing.assert_array_equal(decode_image(data, ImageRules()), np.repeat(expected[..., None], 3, axis=2))
    kept = decode_image(data, KEEP)
    assert kept.dtype == np.uint16
    np.testing.assert_array_equal(kept[..., 0], wide)


@pytest.mark.parametrize("values", [np.array([[-1.5, 1e6]], np.float32), np.array([[-5, 70_000]], np.int32)])
def test_numbers_without_an_agreed_white_are_refused_unless_kept(values):
    data = encode(Image.fromarray(values), "TIFF")
    with pytest.raises(FormatError, match=r"no agreed white.*channels='keep'"):
        decode_image(data, ImageRules())
    kept = decode_image(data, KEEP)
    assert kept.dtype == values.dtype
    np.testing.assert_array_equal(kept[..., 0], values)


def test_one_bit_becomes_black_and_white():
    data = encode(Image.fromarray(np.array([[True, False]])), "PNG")
    assert decode_image(data, GREY)[..., 0].tolist() == [[255, 0]]
    assert decode_image(data, KEEP)[..., 0].tolist() == [[255, 0]]


def test_the_first_picture_of_an_animation_or_of_many_pages_is_taken():
    frames = [Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (10, 200)]
    for format in ("GIF", "TIFF", "WEBP", "PNG"):
        options = {"lossless": True} if format == "WEBP" else {}
        data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(decode_image(data, ImageRules()), np.full((4, 4, 3), 10))


@pytest.mark.parametrize(("resize", "shape"), [("crop", (8, 4)), ("pad", (8, 4)), ("stretch", (8, 4)), ("fit", (2, 4))])
def test_ways_to_resize(resize, shape):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 12:20] = 255
    rules = ImageRules(size=(8, 4), resize=resize, background=(9, 9, 9))
    image = decode_image(encode(Image.fromarray(pixels), "PNG"), rules)
    assert image.shape == (*shape, 3)
    if resize == "crop":
        # The middle quarter is all white, and only it is kept; the filter reaches over its edge a little.
        assert (image[:, 1:3] == 255).all()
        assert image.min() > 200
    if resize == "pad":
        assert (image[:3] == 9).all()
        assert (image[5:] == 9).all()
        assert (image[3:5] != 9).all()


def test_crop_is_the_centred_part_resized_by_pillow():
    pixels = noise(0, (60, 100, 3))
    found = decode_image(encode(Image.fromarray(pixels), "PNG"), ImageRules(size=(20, 20)))
    expected = Image.fromarray(pixels).resize((20, 20), Image.Resampling.BILINEAR, box=(20, 0, 80, 60))
    np.testing.assert_array_equal(found, np.asarray(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_with_every_resize(orientation):
    pixels = np.kron(noise(1, (3, 4, 3)), np.ones((32, 32, 1), np.uint8))
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }[orientation]
    expected = image if turned is None else image.transpose(turned)
    data = encode(image, "PNG", exif=exif)
    np.testing.assert_array_equal(decode_image(data, ImageRules()), np.asarray(expected))
    small = decode_image(data, ImageRules(size=(15, 15), resize="stretch"))
    np.testing.assert_array_equal(small, np.asarray(expected.resize((15, 15), Image.Resampling.BILINEAR)))
    jpeg = encode(image, "JPEG", exif=exif, quality=95, subsampling=0)
    height, width = expected.height // 4, expected.width // 4
    drafted = decode_image(jpeg, ImageRules(size=(height, width), resize="stretch")).astype(int)
    whole = np.asarray(expected.resize((width, height), Image.Resampling.BILINEAR)).astype(int)
    assert drafted.shape == whole.shape
    # A draft filters a little differently, but nothing may be turned or moved.
    assert np.abs(drafted - whole).mean() < 12


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA"])
def test_no_part_of_a_picture_passes_for_a_whole_one(format):
    data = encode(Image.fromarray(noise(0, (20, 25, 3))), format)
    whole = decode_image(data, ImageRules())
    for length in range(0, len(data), 3):
        try:
            part = decode_image(data[:length], ImageRules())
        except CorruptFileError:
            continue
        np.testing.assert_array_equal(part, whole)


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"]),
    position=st.floats(0, 0.999),
    bit=st.integers(0, 7),
)
def test_damaged_pictures_give_an_error_of_this_package_or_an_array(format, position, bit):
    data = bytearray(encode(Image.fromarray(noise(0, (12, 15, 3))), format))
    data[int(position * len(data))] ^= 1 << bit
    with suppress(CorruptFileError, FormatError):
        assert decode_image(bytes(data), ImageRules(max_pixels=10_000)).ndim == 3


def test_settings_of_the_program_do_not_let_half_pictures_pass(monkeypatch):
    data = encode(Image.fromarray(noise(0, (40, 40, 3))), "JPEG")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(CorruptFileError, match="incomplete"):
        decode_image(data[:-300], ImageRules())
    assert decode_image(data, ImageRules()).shape == (40, 40, 3)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    assert Image.MAX_IMAGE_PIXELS == 10


def test_masks_keep_their_numbers():
    wide = np.array([[0, 300], [65535, 1]], np.uint16)
    assert decode_mask(encode(Image.fromarray(wide), "PNG"), ImageRules()).tolist() == wide.tolist()
    bits = decode_mask(encode(Image.fromarray(np.array([[True, False]])), "PNG"), ImageRules())
    assert bits.tolist() == [[1, 0]]
    padded = decode_mask(encode(Image.fromarray(np.full((2, 4), 7, np.uint8)), "PNG"), ImageRules((4, 4), "pad"))
    assert padded.tolist() == [[0] * 4, [7] * 4, [7] * 4, [0] * 4]


def test_shown_size_swaps_with_the_orientation():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (30, 20))
    image.getexif().update(exif)
    assert shown_size(image) == (30, 20)
    assert shown_size(Image.new("RGB", (30, 20))) == (20, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 5)}, "expected \\(height, width\\)"),
        ({"size": (5,)}, "expected \\(height, width\\)"),
        ({"resize": "squeeze"}, "resize='squeeze'"),
        ({"channels": "BGR"}, "channels='BGR'"),
    ],
)
def test_rules_are_checked_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        ImageRules(**options)
