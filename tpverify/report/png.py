"""A picture of few colours as a PNG file (ISO/IEC 15948), without a library for pictures."""

import struct
import zlib

import numpy as np
import numpy.typing as npt


def encode(pixels: npt.NDArray[np.uint8], colours: npt.NDArray[np.uint8]) -> bytes:
    """pixels [height, width]: indices into colours [n <= 256, 3], red, green and blue."""
    height, width = pixels.shape
    assert height and width and len(colours) <= 256 and pixels.max() < len(colours)
    header = struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, indexed, not interlaced
    lines = np.pad(pixels, ((0, 0), (1, 0)))  # each after the number of its filter: none
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", header),
            (b"PLTE", colours.astype(np.uint8).tobytes()),
            (b"IDAT", zlib.compress(lines.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
