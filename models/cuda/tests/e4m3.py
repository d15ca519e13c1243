"""Matrices in e4m3 with a scale for each block, and the numbers that they stand for."""
import harness
import torch
from abi import SCALE_COLUMNS, Scales, fill


def values():
    """The numbers of all bytes, in float32; NaN where they are none."""
    bits = torch.arange(256)
    exponent, mantissa = bits >> 3 & 15, (bits & 7).float()
    magnitude = torch.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[(bits & 127) == 127] = float("nan")
    return torch.where(bits < 128, magnitude, -magnitude).to(harness.device)


class E4m3:
    """Random bytes [rows, columns], any but NaN, in a buffer of NaN with a gap after each row; a scale for every
    `block_rows` of them, of such size that the numbers are of size `scale`, NaN after each row of scales."""

    def __init__(self, rows, columns, block_rows, scale, seed, gap=0):
        gen = torch.Generator(device=harness.device).manual_seed(seed)
        draw = lambda *shape: torch.randint(0, 254, shape, generator=gen)
        drawn = draw(rows, columns)
        self.buf = torch.full((rows + 4, columns + gap), 0x7F, dtype=torch.uint8)
        self.bytes = self.buf[2:2 + rows, :columns]
        self.bytes.copy_(drawn + (drawn >= 127))    # past one NaN, and below the other
        blocks = -(-rows // block_rows), -(-columns // SCALE_COLUMNS)
        self.scales = torch.full((blocks[0], blocks[1] + 1), float("nan"))
        self.scales[:, :-1] = (0.5 + draw(*blocks) / 254) * (scale / 120)
        self.block_rows = block_rows

    def numbers(self):
        """In float32, each rounded once."""
        rows, columns = self.bytes.shape
        wide = self.scales[:, :-1].repeat_interleave(self.block_rows, 0)[:rows]
        return values()[self.bytes.long()] * wide.repeat_interleave(SCALE_COLUMNS, 1)[:, :columns]

    def exact(self):
        """In float64."""
        rows, columns = self.bytes.shape
        wide = self.scales[:, :-1].double().repeat_interleave(self.block_rows, 0)[:rows]
        return values()[self.bytes.long()].double() * wide.repeat_interleave(SCALE_COLUMNS, 1)[:, :columns]

    def struct(self):
        return fill(Scales, ptr=self.scales, stride=self.scales.stride(0), rows=self.block_rows)
