"""Block formats of docs/arithmetic.md, element by element as its table says: slow, independent of the C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from exact_arithmetic import add, f16_to_f32, f32, fma, halving_tree, mul
from gguf import quants

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass
class Weights:
    """A row: q per element, scale and minimum per `sub` elements, d and offset per block."""

    sub: int
    q: list[int] = field(default_factory=list)
    scale: list[int] = field(default_factory=list)
    minimum: list[int] | None = None
    d: list[float] = field(default_factory=list)
    offset: list[float] | None = None

    def values(self) -> list[float]:
        """The row dequantised."""
        block = len(self.q) // len(self.d)
        out = []
        for e, q in enumerate(self.q):
            y = mul(mul(self.d[e // block], float(self.scale[e // self.sub])), float(q))
            if self.minimum is not None and self.offset is not None:
                y = add(y, mul(self.offset[e // block], float(self.minimum[e // self.sub])))
            out.append(y)
        return out

    def product(self, x: Sequence[int], a: Sequence[float]) -> float:
        """The product with an activation row: integers x, scales a per block."""
        block = len(self.q) // len(self.d)
        partial = [0.0] * 8
        for i, d in enumerate(self.d):
            subs = [range(e, e + self.sub) for e in range(i * block, (i + 1) * block, self.sub)]
            isum = f32(Fraction(sum(self.scale[s.start // self.sub] * sum(self.q[e] * x[e] for e in s) for s in subs)))
            t = mul(mul(d, a[i]), isum)
            if self.minimum is not None and self.offset is not None:
                msum = f32(Fraction(sum(self.minimum[s.start // self.sub] * sum(x[e] for e in s) for s in subs)))
                t = fma(mul(d, a[i]), isum, mul(mul(self.offset[i], a[i]), msum))
            partial[i * block // 256 % 8] = add(partial[i * block // 256 % 8], t)
        return halving_tree(partial)


def half(b: bytes, at: int) -> float:
    return f16_to_f32(b[at] | b[at + 1] << 8)


def nibble(b: bytes, e: int) -> int:
    return b[e % 16] >> 4 * (e // 16) & 15


def six_bits(s: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum j of Q4_K and Q5_K."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def legacy(name: str, b: bytes) -> tuple[list[int], float, float | None]:
    """Integers, d and offset of one block of 32."""
    elements = range(32)
    if name == "Q4_0":
        return [nibble(b[2:], e) - 8 for e in elements], half(b, 0), None
    if name == "Q4_1":
        return [nibble(b[4:], e) for e in elements], half(b, 0), half(b, 2)
    if name == "Q5_0":
        high = int.from_bytes(b[2:6], "little")
        return [(nibble(b[6:], e) | (high >> e & 1) << 4) - 16 for e in elements], half(b, 0), None
    if name == "Q5_1":
        high = int.from_bytes(b[4:8], "little")
        return [nibble(b[8:], e) | (high >> e & 1) << 4 for e in elements], half(b, 0), half(b, 2)
    if name == "Q8_0":
        return [b[2 + e] - 256 * (b[2 + e] >> 7) for e in elements], half(b, 0), None
    if name == "IQ4_NL":
        return [IQ4[nibble(b[2:], e)] for e in elements], half(b, 0), None
    if name == "MXFP4":
        return [FP4[nibble(b[1:], e)] for e in elements], 2.0 ** (b[0] - 128), None
    raise ValueError(name)


def k_integers(name: str, b: bytes) -> list[int]:
    """Integers of one block of 256."""
    out = []
    for e in range(256):
        s, h, g, l = e // 32, e // 128, e % 128 // 32, e % 32  # noqa: E741
        if name == "Q2_K":
            out.append(b[16 + 32 * h + l] >> 2 * g & 3)
        elif name == "Q3_K":
            out.append((b[32 + 32 * h + l] >> 2 * g & 3) - (0 if b[l] >> 4 * h + g & 1 else 4))
        elif name == "Q4_K":
            out.append(b[16 + 32 * (e // 64) + l] >> 4 * (s % 2) & 15)
        elif name == "Q5_K":
            out.append((b[48 + 32 * (e // 64) + l] >> 4 * (s % 2) & 15) + 16 * (b[16 + l] >> s & 1))
        elif name == "Q6_K":
            low = b[64 * h + 32 * (g % 2) + l] >> 4 * (g // 2) & 15
            out.append((low | (b[128 + 32 * h + l] >> 2 * g & 3) << 4) - 32)
        elif name == "IQ4_XS":
            out.append(IQ4[nibble(b[8 + 16 * s :], l)])
        else:
            raise ValueError(name)
    return out


def k_scales(name: str, b: bytes) -> tuple[list[int], list[int] | None, float, float | None]:
    """Scales, minima, d and offset of one block of 256."""
    if name == "Q2_K":
        return [v & 15 for v in b[:16]], [v >> 4 for v in b[:16]], half(b, 80), -half(b, 82)
    if name == "Q3_K":
        s = b[96:108]
        low = [s[j] & 15 if j < 8 else s[j - 8] >> 4 for j in range(16)]
        return [(low[j] | (s[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32 for j in range(16)], None, half(b, 108), None
    if name in ("Q4_K", "Q5_K"):
        pairs = [six_bits(b[4:16], j) for j in range(8)]
        return [p[0] for p in pairs], [p[1] for p in pairs], half(b, 0), -half(b, 2)
    if name == "Q6_K":
        return [v - 256 * (v >> 7) for v in b[192:208]], None, half(b, 208), None
    high = b[2] | b[3] << 8
    scales = [((b[4 + j // 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32 for j in range(8)]
    return scales, None, half(b, 0), None


def unpack(name: str, row: bytes, block_bytes: int, sub: int) -> Weights:
    """A row of an integer class."""
    w = Weights(sub)
    minima: list[int] = []
    offsets: list[float] = []
    for start in range(0, len(row), block_bytes):
        b = row[start : start + block_bytes]
        if name.endswith("_K") or name == "IQ4_XS":
            scale, minimum, d, offset = k_scales(name, b)
            w.q += k_integers(name, b)
        else:
            q, d, offset = legacy(name, b)
            scale, minimum = [1], None if offset is None else [1]
            w.q += q
        w.scale += scale
        w.d.append(d)
        if minimum is not None and offset is not None:
            minima += minimum
            offsets.append(offset)
    if offsets:
        w.minimum, w.offset = minima, offsets
    return w


# Types of the float class with blocks


def nib(b: int, i: int) -> int:
    return b >> 4 * (i % 2) & 15


def even(seven: int) -> int:
    """Seven sign bits and an eighth that makes the number of set ones even."""
    return seven | (seven.bit_count() & 1) << 7


def e4m3(x: int) -> Fraction:
    exponent, m = x >> 3 & 15, x & 7
    if x == 127:
        return Fraction(0)
    return Fraction(m, 512) if exponent == 0 else (1 + Fraction(m, 8)) * Fraction(2) ** (exponent - 7)


def word(b: bytes, at: int, size: int) -> int:
    return int.from_bytes(b[at : at + size], "little")


def code(name: str, b: bytes, e: int) -> tuple[Fraction, int, int, int]:
    """Of element e of an IQ2 or IQ3 block: what d is multiplied by, grid entry, byte of it, eight signs."""
    n, s, k, j = e // 8, e // 32, e % 32 // 8, e % 8
    t = j // 4
    half_, quarter = Fraction(1, 2), Fraction(1, 4)
    if name == "IQ2_XXS":
        a = word(b, 6 + 8 * s, 4)
        return (half_ + (a >> 28)) * quarter, b[2 + 8 * s + k], j, even(a >> 7 * k & 127)
    if name == "IQ2_XS":
        w = word(b, 2 + 2 * n, 2)
        return (half_ + nib(b[66 + s], k // 2)) * quarter, w & 511, j, even(w >> 9)
    if name == "IQ2_S":
        entry = b[2 + n] + 256 * (b[66 + s] >> 2 * k & 3)
        return (half_ + nib(b[74 + s], k // 2)) * quarter, entry, j, b[34 + n]
    if name == "IQ3_XXS":
        a = word(b, 66 + 4 * s, 4)
        return (half_ + (a >> 28)) * half_, b[2 + 2 * n + t], j % 4, even(a >> 7 * k & 127)
    if name == "IQ3_S":
        entry = b[2 + 2 * n + t] + 256 * (b[66 + s] >> 2 * k + t & 1)
        return Fraction(1 + 2 * nib(b[106 + s // 2], s)), entry, j % 4, b[74 + n]
    raise ValueError(name)


def float_values(name: str, row: bytes, block: int, block_bytes: int) -> list[float]:
    """A row of a type of the float class with blocks, dequantised; its factors are finite."""
    out = []
    if name != "NVFP4":
        quant = getattr(quants, name)
        quant.init_grid()
        grid = quant.grid.reshape(quant.grid_shape).astype(int).tolist()
    for start in range(0, len(row), block_bytes):
        b = row[start : start + block_bytes]
        for e in range(block):
            n, j = e // 8, e % 8
            if name == "NVFP4":
                value = e4m3(b[n // 2]) / 2 * FP4[nib(b[4 + 8 * (n // 2) + j], n)]
                out.append(f32(value))
            else:
                times, entry, byte, signs = code(name, b, e)
                negative = bool(signs >> j & 1)
                value = Fraction(half(b, 0)) * times * grid[entry][byte]
                out.append(f32(-value if negative else value, negative_zero=negative != (b[1] > 127)))
    return out
