"""One picture to one array, by stated rules. Nothing is clipped, and nothing that is only partly decoded passes.

The order of the steps: size limit, EXIF rotation, mode, resize. Modes, where ``channels`` is ``RGB`` or ``L``:

- 1-bit: black and white become 0 and 255. Grey is repeated for RGB; colour becomes luma (ITU-R 601-2) for L.
- Palette: its colours, never its indices. CMYK and YCbCr: Pillow's conversion, without colour management.
- Transparency of any kind is composited on ``background``.
- 16-bit grey: scaled by 255 / 65535 and rounded. 16-bit colour PNG: the high byte, as Pillow delivers it.
- 32-bit integers and floats have no agreed white: refused, except with ``channels="keep"``.

``channels="keep"`` stores grey, 16-bit, 32-bit, float, RGB, RGBA and CMYK as they are; 1-bit as 0 and 255, palettes
as RGB or RGBA. Of an animated or multi-page file the first picture is taken.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError, MissingDependencyError

try:
    from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise MissingDependencyError("converting images needs Pillow: pip install 'lightning_fastio[images]'") from error

Pixels: TypeAlias = npt.NDArray[Any]
Resize: TypeAlias = Literal["crop", "fit", "pad", "stretch"]
Channels: TypeAlias = Literal["RGB", "L", "keep"]

_SWAPPING_ORIENTATIONS = (5, 6, 7, 8)
_EXIF_ORIENTATION = 0x0112
# A draft is at least twice as large as what is asked for, as in Pillow's own thumbnail(): no visible difference.
_DRAFT_GAP = 2.0


class _PillowSettings:
    """Settings of Pillow that are global to the process, set while any picture is open, restored after the last.

    Its limit of pixels warns or raises for the whole process: ours holds for one picture. Half pictures stay errors
    whatever the program has set. Warnings about odd metadata are noise a million files later; damage raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[int | None, bool] = (None, False)
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.simplefilter("ignore")

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._warnings.__exit__(None, None, None)
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_pillow_settings = _PillowSettings()


@dataclass(frozen=True)
class ImageRules:
    """How pictures become arrays."""

    size: tuple[int, int] | None = None
    """(height, width) of every picture; None keeps the size that each has."""
    resize: Resize = "crop"
    """``crop``: fill ``size`` and cut the rest off, centred; ``pad``: fit inside and fill up with ``background``;
    ``stretch``: ignore the ratio; ``fit``: fit inside, each picture with its own size (needs ragged storage)."""
    channels: Channels = "RGB"
    """``RGB``, ``L`` (grey), or ``keep``."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Colour under transparent pixels and in padding."""
    max_pixels: int = 178_956_970
    """Larger pictures count as broken (a guard against decompression bombs)."""

    def __post_init__(self) -> None:
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ConfigError(f"size={self.size!r}: expected (height, width), both at least 1")
        if self.resize not in ("crop", "fit", "pad", "stretch"):
            raise ConfigError(f"resize={self.resize!r}: expected 'crop', 'pad', 'stretch' or 'fit'")
        if self.channels not in ("RGB", "L", "keep"):
            raise ConfigError(f"channels={self.channels!r}: expected 'RGB', 'L' or 'keep'")

    @property
    def same_size(self) -> bool:
        """Whether every picture comes out with the same height and width."""
        return self.size is not None and self.resize != "fit"


def decode_image(data: bytes, rules: ImageRules) -> Pixels:
    """Decode an encoded picture.

    Returns:
        Array of shape ``(height, width, channels)``; uint8 unless ``channels="keep"`` met another type.

    Raises:
        CorruptFileError: It is not a picture, is incomplete or damaged, or has more than ``max_pixels``.
        FormatError: Its mode has no rule.
    """
    with _opened(data, rules.max_pixels) as image:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
        _draft(image, rules, swapped=orientation in _SWAPPING_ORIENTATIONS)
        # It copies the picture even where there is nothing to turn.
        oriented = image if orientation == 1 else ImageOps.exif_transpose(image)
        array = np.asarray(_resized(_in_mode(oriented, rules), rules))
    return array[..., None] if array.ndim == 2 else array


def decode_mask(data: bytes, rules: ImageRules) -> Pixels:
    """Decode a mask of class numbers: palette indices and grey values as they are, resized without mixing.

    Returns:
        Array of shape ``(height, width)``: uint8, or int32 for 16 and 32 bits a pixel; 1-bit masks give 0 and 1.

    Raises:
        CorruptFileError: It is not a picture, is incomplete or damaged, or has more than ``max_pixels``.
        FormatError: It has more than one channel, or floats.
    """
    with _opened(data, rules.max_pixels) as image:
        if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
            raise FormatError(f"a mask has one channel of class numbers, this one is {image.mode}")
        wide = image.mode.startswith("I")
        oriented = ImageOps.exif_transpose(image)
        array = np.asarray(oriented)
    # Pillow treats palette and 16-bit pictures differently from version to version; as int32 they resize alike.
    plain = Image.fromarray(array.astype(np.int32))
    mask = np.asarray(_resized(plain, rules, resample=Image.Resampling.NEAREST, background=0))
    return mask if wide else mask.astype(np.uint8)


def check_encoded(data: bytes, rules: ImageRules) -> tuple[int, int]:
    """Make sure that an encoded picture decodes to its end, at the least cost. Returns (height, width) as shown.

    Raises:
        CorruptFileError: It is not a picture, is incomplete or damaged, or has more than ``max_pixels``.
    """
    with _opened(data, rules.max_pixels) as image:
        height, width = shown_size(image)
        image.draft(None, (1, 1))
        image.load()
    return height, width


def shown_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) after the EXIF rotation."""
    width, height = image.size
    swapped = image.getexif().get(_EXIF_ORIENTATION) in _SWAPPING_ORIENTATIONS
    return (width, height) if swapped else (height, width)


def header_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """(height, width) of an encoded picture as shown, out of its header.

    Raises:
        CorruptFileError: It is not a picture, or has more than ``max_pixels``.
    """
    with _opened(data, max_pixels) as image:
        return shown_size(image)


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    if not data:
        raise CorruptFileError("the file is empty")
    with _pillow_settings:
        try:
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise CorruptFileError(
                        f"too large: {width} x {height} pixels are more than max_pixels={max_pixels}; "
                        f"raise it to allow this"
                    )
                yield image
        except (CorruptFileError, FormatError):
            raise
        except Exception as error:
            # Pillow's decoders let out nearly every class of error for damaged files.
            raise CorruptFileError(_reason(error, data)) from error


def _reason(error: Exception, data: bytes) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not a picture that Pillow knows; it begins with {data[:16]!r}"
    return f"incomplete or damaged picture: {type(error).__name__}: {error}"


def _draft(image: Image.Image, rules: ImageRules, *, swapped: bool) -> None:
    """Let a JPEG decode at a half, a quarter or an eighth when it will shrink anyway."""
    if rules.size is None:
        return
    height, width = reversed(rules.size) if swapped else rules.size
    image.draft(None, (int(width * _DRAFT_GAP), int(height * _DRAFT_GAP)))


def _in_mode(image: Image.Image, rules: ImageRules) -> Image.Image:
    """The picture in the mode in which it is stored, by the rules at the top of this module."""
    mode, keep = image.mode, rules.channels == "keep"
    if image.has_transparency_data and not keep:
        return _on_background(image, rules)
    if mode == "P":
        return image.convert(("RGBA" if image.has_transparency_data else "RGB") if keep else rules.channels)
    if mode == "1":
        return image.convert("L" if keep else rules.channels)
    if mode.startswith("I;16"):
        return image if keep else _eight_bits(image).convert(rules.channels)
    if mode in ("I", "F") and not keep:
        if image.format == "PNG" and mode == "I":
            # What older Pillow calls a 16-bit PNG.
            return _eight_bits(image).convert(rules.channels)
        raise FormatError(
            f"a picture of mode {mode} ({'32-bit integers' if mode == 'I' else 'floats'}) has no agreed white; "
            f"keep its values with channels='keep', or convert it in a function of your own with fn="
        )
    if mode in ("LAB", "HSV") and not keep:
        return image.convert("RGB").convert(rules.channels)
    return image if keep or mode == rules.channels else image.convert(rules.channels)


def _on_background(image: Image.Image, rules: ImageRules) -> Image.Image:
    with_alpha = image.convert("RGBA")
    below = Image.new("RGBA", image.size, (*rules.background, 255))
    return Image.alpha_composite(below, with_alpha).convert(rules.channels)


def _eight_bits(image: Image.Image) -> Image.Image:
    wide = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))


def _resized(
    image: Image.Image,
    rules: ImageRules,
    *,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
    background: int | None = None,
) -> Image.Image:
    if rules.size is None:
        return image
    height, width = rules.size
    if rules.resize == "stretch":
        return image if image.size == (width, height) else image.resize((width, height), resample)
    if rules.resize == "crop":
        return image.resize((width, height), resample, box=_centred_box(image.size, (width, height)))
    scale = min(width / image.width, height / image.height)
    inner = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    fitted = image if image.size == inner else image.resize(inner, resample)
    if rules.resize == "fit" or inner == (width, height):
        return fitted
    padded = Image.new(fitted.mode, (width, height), _fill(fitted.mode, rules) if background is None else background)
    padded.paste(fitted, ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return padded


def _centred_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest centred part of ``size`` that has the ratio of ``target``; both (width, height)."""
    scale = min(size[0] / target[0], size[1] / target[1])
    width, height = target[0] * scale, target[1] * scale
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, min(left + width, size[0]), min(top + height, size[1])


def _fill(mode: str, rules: ImageRules) -> Any:
    if mode == "RGB":
        return rules.background
    if mode == "RGBA":
        return (*rules.background, 255)
    if mode == "L":
        red, green, blue = rules.background
        return (red * 299 + green * 587 + blue * 114 + 500) // 1000
    return 0
