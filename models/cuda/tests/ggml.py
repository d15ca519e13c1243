"""Matrices in ggml's block types, of random bytes, and the numbers that they stand for."""
import harness
import torch
from abi import Q4_K, Q6_K, Q8_0

NAMES = {"q8_0": Q8_0, "q4_K": Q4_K, "q6_K": Q6_K}
INPUTS = {"q8_0": 32, "q4_K": 256, "q6_K": 256}    # of a block
BYTES = {"q8_0": 34, "q4_K": 144, "q6_K": 210}
SCALES = {"q8_0": [0], "q4_K": [0, 2], "q6_K": [208]}    # where its f16 numbers stand
STEPS = {"q8_0": 1 / 73, "q4_K": 1 / 300, "q6_K": 1 / 1400}    # a scale with which the numbers are about of size 1
MULTIPLE = {"q8_0": 128, "q4_K": 256, "q6_K": 256}    # inputs that are packed


def packed_room(count):
    """Bytes at a multiple of 128 for so many, with others after them."""
    buffer = torch.full((count + 256,), 0xEE, dtype=torch.uint8)
    return buffer[-buffer.data_ptr() % 128:]


class Blocks:
    """Random bytes [outputs, blocks of a row, bytes], with scales of such size that the numbers are of size `scale`."""

    def __init__(self, name, outputs, inputs, scale, seed):
        gen = torch.Generator(device=harness.device).manual_seed(seed)
        self.name, self.outputs, self.inputs = name, outputs, inputs
        shape = outputs, inputs // INPUTS[name]
        self.bytes = torch.randint(0, 256, (*shape, BYTES[name]), generator=gen, dtype=torch.uint8)
        for at in SCALES[name]:
            half = 0.5 + torch.rand(*shape, generator=gen)
            self.put(slice(None), slice(None), at, half * (scale * STEPS[name]))

    def put(self, output, block, at, value):
        """An f16 number of some blocks."""
        value = torch.as_tensor(value).half()
        there = self.bytes[output, block, at:at + 2]
        there.copy_(value.reshape(*value.shape, 1).view(torch.uint8).expand_as(there))

    def half(self, at):
        return self.bytes[..., at:at + 2].contiguous().view(torch.float16)

    def numbers(self, dtype=torch.float64):
        """[outputs, inputs]"""
        b = self.bytes
        if self.name == "q8_0":
            n = self.half(0).to(dtype) * b[..., 2:].contiguous().view(torch.int8).to(dtype)
        elif self.name == "q4_K":
            s = b[..., 4:16].int()
            scale = torch.cat([s[..., :4] & 63, (s[..., 8:] & 15) | (s[..., :4] >> 6 << 4)], -1)
            minimum = torch.cat([s[..., 4:8] & 63, (s[..., 8:] >> 4) | (s[..., 4:8] >> 6 << 4)], -1)
            q = b[..., 16:].reshape(*b.shape[:2], 4, 1, 32)
            q = torch.cat([q & 15, q >> 4], -2).reshape(*b.shape[:2], 8, 32)
            n = (self.half(0).to(dtype) * scale.to(dtype))[..., None] * q.to(dtype)
            n = n - (self.half(2).to(dtype) * minimum.to(dtype))[..., None]
        else:
            lower, upper = (b[..., :128].reshape(*b.shape[:2], 2, 1, 64), b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32))
            lower = torch.cat([lower & 15, lower >> 4], -2).reshape(*b.shape[:2], 2, 4, 32)
            upper = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2)
            q = (lower | upper << 4).to(dtype).reshape(*b.shape[:2], 16, 16) - 32
            scale = b[..., 192:208].contiguous().view(torch.int8).to(dtype)
            n = self.half(208).to(dtype)[..., None] * (scale[..., None] * q)
        return n.reshape(self.outputs, self.inputs)
