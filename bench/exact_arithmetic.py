"""docs/arithmetic.md evaluated with exact rationals: slow, independent of the C++, step by step as the text says.

A float32 number is a Python float that holds one exactly (so signed zeros, infinities and NaN need no type of their
own). Every operation forms the exact rational result and rounds it once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

NAN = math.nan


def bits(x: float) -> int:
    """Bits of a float32 number; every NaN is the canonical one."""
    return 0x7FC00000 if math.isnan(x) else int(struct.unpack("<I", struct.pack("<f", x))[0])


def from_bits(u: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", u))[0])


def round_ratio(n: int, d: int, digits: int, least: int, greatest: float, negative_zero: bool = False) -> float:
    """n / d, d > 0, to the nearest multiple of 2^least with at most `digits` significant bits, ties to even; infinity
    beyond `greatest`."""
    if n == 0:
        return -0.0 if negative_zero else 0.0
    sign, n = (-1.0, -n) if n < 0 else (1.0, n)
    exponent = n.bit_length() - d.bit_length()
    if d << max(exponent, 0) > n << max(-exponent, 0):
        exponent -= 1
    # The integers of n / d in steps of 2^step, and what is left of it.
    step = max(exponent - digits + 1, least)
    d <<= max(step, 0)
    steps, rest = divmod(n << max(-step, 0), d)
    if 2 * rest > d or (2 * rest == d and steps % 2):
        steps += 1
    rounded = math.ldexp(steps, step)
    return math.copysign(math.inf if rounded > greatest else rounded, sign)


LARGEST = float.fromhex("0x1.fffffep127")


def f32_ratio(n: int, d: int, negative_zero: bool = False) -> float:
    return round_ratio(n, d, 24, -149, LARGEST, negative_zero)


def f32(x: Fraction, negative_zero: bool = False) -> float:
    return f32_ratio(x.numerator, x.denominator, negative_zero)


def _finite(*x: float) -> bool:
    return all(map(math.isfinite, x))


def _negative(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def add(a: float, b: float) -> float:
    if not _finite(a, b) or 0 in (a, b):
        return a + b  # exact
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    return f32_ratio(an * bd + bn * ad, ad * bd)


def sub(a: float, b: float) -> float:
    return add(a, -b)


def mul(a: float, b: float) -> float:
    if not _finite(a, b):
        return a * b
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    return f32_ratio(an * bn, ad * bd, negative_zero=_negative(a) != _negative(b))


def fma(a: float, b: float, c: float) -> float:
    if not _finite(a, b, c):
        return a * b + c
    zero_product = 0 in (a, b)
    negative = _negative(a) != _negative(b)
    (an, ad), (bn, bd), (cn, cd) = a.as_integer_ratio(), b.as_integer_ratio(), c.as_integer_ratio()
    zero = zero_product and negative and _negative(c)
    return f32_ratio(an * bn * cd + cn * ad * bd, ad * bd * cd, negative_zero=zero)


def div(a: float, b: float) -> float:
    if b == 0 and not math.isnan(a):
        return NAN if a == 0 else math.copysign(math.inf, -1.0 if _negative(a) != _negative(b) else 1.0)
    if not _finite(a, b):
        return a / b
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    return f32_ratio((an if bn > 0 else -an) * bd, ad * abs(bn), negative_zero=_negative(a) != _negative(b))


def sqrt(x: float) -> float:
    if not _finite(x) or x <= 0:
        return NAN if x < 0 else x
    exact = Fraction(x)
    # floor(sqrt) at 80 bits below the point, and half a unit more where that is not the root itself
    scaled = exact * 4**200
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = root * root != scaled
    return f32(Fraction(2 * root + int(inexact), 2 * 2**200))


# Conversions


def round_even(x: float) -> float:
    magic = float(3 << 22)
    return sub(add(x, magic), magic)


def f32_to_f16(x: float) -> int:
    if math.isnan(x):
        return 0x7E00
    sign = 0x8000 if _negative(x) else 0
    if abs(x) >= 65504:
        return sign | 0x7BFF
    return sign | int(
        struct.unpack("<H", struct.pack("<e", round_ratio(*abs(x).as_integer_ratio(), 11, -24, 65504.0)))[0]
    )


def f16_to_f32(h: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", h))[0])


def bf16_to_f32(h: int) -> float:
    return from_bits(h << 16)


# Functions

LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
EXP_LOW = float.fromhex("-0x1.5d589ep+6")
EXP = [float.fromhex(c) for c in ("0x1.6a4960p-10", "0x1.1239a0p-7", "0x1.5558b4p-5", "0x1.555492p-3", "0x1.fffffcp-2")]
LOG = [float.fromhex(c) for c in ("0x1.f090c2p-4", "0x1.b72ad6p-4", "0x1.250514p-3", "0x1.9996d8p-3", "0x1.555558p-2")]


def horner(coefficients: Sequence[float], x: float) -> float:
    value = coefficients[0]
    for c in coefficients[1:]:
        value = fma(value, x, c)
    return value


def exp(x: float) -> float:
    if math.isnan(x):
        return NAN
    if x < EXP_LOW:
        return 0.0
    x = min(x, 88.0)
    n = round_even(mul(x, LOG2_E))
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    return mul(horner([*EXP, 1.0, 1.0], r), 2.0 ** int(n))


def sigmoid(x: float) -> float:
    return div(1.0, add(1.0, exp(-x)))


def silu(x: float) -> float:
    return mul(x, sigmoid(x))


def log1p_unit(u: float) -> float:
    s = div(u, add(2.0, u))
    z = mul(s, s)
    twice = add(s, s)
    return fma(mul(twice, z), horner(LOG, z), twice)


def softplus(x: float) -> float:
    return add(x if x > 0 else 0.0, log1p_unit(exp(-abs(x))))


# Sums


def halving_tree(partial: list[float]) -> float:
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [add(partial[j], partial[j + half]) for j in range(half)]
    return partial[0]


def dot32(x: Sequence[float], w: Sequence[float]) -> float:
    partial = [0.0] * 32
    for i, (a, b) in enumerate(zip(x, w, strict=True)):
        partial[i % 32] = fma(a, b, partial[i % 32])
    return halving_tree(partial)


def rms_factor(x: Sequence[float], eps: float) -> float:
    return div(1.0, sqrt(add(div(dot32(x, x), float(len(x))), eps)))


def l2_factor(x: Sequence[float], eps: float) -> float:
    return div(1.0, sqrt(add(dot32(x, x), eps)))


# Attention


def page(scores: Sequence[float], values: Sequence[Sequence[float]]) -> tuple[float, float, list[float]]:
    """(m, l, o) of one page."""
    m = scores[0]
    for s in scores[1:]:
        m = m if m > s else s
    total, o = 0.0, [0.0] * len(values[0])
    for s, v in zip(scores, values, strict=True):
        e = exp(sub(s, m))
        total = add(total, e)
        o = [fma(e, a, b) for a, b in zip(v, o, strict=True)]
    return m, total, o


def merge(
    m1: float, l1: float, o1: Sequence[float], m2: float, l2: float, o2: Sequence[float]
) -> tuple[float, float, list[float]]:
    m = m1 if m1 > m2 else m2
    c1, c2 = exp(sub(m1, m)), exp(sub(m2, m))
    return m, fma(l2, c2, mul(l1, c1)), [fma(b, c2, mul(a, c1)) for a, b in zip(o1, o2, strict=True)]


# Rotary embedding; float64 here, Python's own arithmetic is that of the text


def sin_cos(angle: float) -> tuple[float, float]:
    magic = float(3 << 51)
    k = (angle * float.fromhex("0x1.45f306dc9c883p-1") + magic) - magic
    r = angle - k * float.fromhex("0x1.921fb54p+0")
    r = r - k * float.fromhex("0x1.10b46118p-30")
    r = r - k * float.fromhex("0x1.313198a2e0370p-61")
    z = r * r
    s = 1 / math.factorial(17)
    for n in range(15, 2, -2):
        s = s * z + (-1.0) ** (n // 2) / math.factorial(n)
    s = (s * z) * r + r
    c = 1 / math.factorial(16)
    for n in range(14, -1, -2):
        c = c * z + (-1.0) ** (n // 2) / math.factorial(n)
    return ((s, c), (c, -s), (-s, -c), (-c, s))[int(k) % 4]


def rope(position: int, inv_freq: float, magnitude: float) -> tuple[float, float]:
    """Cosine and sine."""
    s, c = sin_cos(float(position) * inv_freq)
    return f32(Fraction(c * magnitude)), f32(Fraction(s * magnitude))


def rotate(a: float, b: float, cosine: float, sine: float) -> tuple[float, float]:
    return fma(a, cosine, -mul(b, sine)), fma(a, sine, mul(b, cosine))


# Activations


def quantise(x: Sequence[float]) -> tuple[list[int], float]:
    """One block of activations: q and a."""
    if not _finite(*x):
        return [0] * len(x), NAN
    largest = max(map(abs, x))
    if largest < 2.0**-96:
        return [0] * len(x), 0.0
    inverse = div(127.0, largest)
    return [int(round_even(max(-127.0, min(127.0, mul(v, inverse))))) for v in x], div(largest, 127.0)


# Sampling


def philox(key: int, counter: int) -> list[int]:
    """The four words of Philox4x32-10 at a 128-bit counter."""
    mask = 0xFFFFFFFF
    k = [key & mask, key >> 32]
    c = [counter >> 32 * i & mask for i in range(4)]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & mask, a >> 32 ^ c[3] ^ k[1], a & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return c


def limited(x: float) -> float:
    largest = float.fromhex("0x1.fffffep127")
    return max(-largest, min(largest, x))


def adjusted(
    logits: Sequence[float],
    bias: Sequence[tuple[int, float]],
    repetition: float,
    presence: float,
    frequency: float,
    history: Sequence[int],
    prompt: int,
) -> list[float]:
    """Logits after bias and penalties, all float32 numbers."""
    out = list(logits)
    for i, value in bias:
        out[i] = limited(add(out[i], value))
    if repetition != 1:
        for i in set(history):
            out[i] = limited(div(out[i], repetition) if out[i] > 0 else mul(out[i], repetition))
    output = history[prompt:]
    for i in set(output):
        out[i] = limited(sub(sub(out[i], mul(float(output.count(i)), frequency)), presence))
    return out


def sample(
    logits: Sequence[float],
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    index: int,
    *,
    min_p: float = 0.0,
    bias: Sequence[tuple[int, float]] = (),
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    history: Sequence[int] = (),
    prompt: int = 0,
) -> int:
    logits = adjusted(logits, bias, repetition, presence, frequency, history, prompt)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    if temperature == 0:
        return order[0]

    def weight(i: int, t: float) -> int:
        return int(exp(div(sub(logits[i], best), t)) * 2**32)

    kept = order[:top_k] if top_k else order
    if top_p < 1:
        limit = top_p * float(sum(weight(i, 1.0) for i in kept))
        sums = 0
        for n, i in enumerate(kept, 1):
            sums += weight(i, 1.0)
            if sums >= limit:
                kept = kept[:n]
                break
    if min_p > 0:
        kept = kept[:1] + [i for i in kept[1:] if weight(i, 1.0) >= min_p * 2.0**32]
    weights = [weight(i, temperature) for i in kept]
    words = philox(seed, index)
    target = (words[0] | words[1] << 32) * sum(weights) >> 64
    for i, w in zip(kept, weights, strict=True):
        if target < w:
            return i
        target -= w
    raise AssertionError("the weights of the kept candidates add up to more than the target")


def logprobs(logits: Sequence[float], token: int, best: int) -> list[tuple[int, float]]:
    """Logarithms of probabilities: that of `token`, then those of the `best` most likely ones."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    largest = logits[order[0]]
    total = f32(Fraction(sum(int(exp(sub(x, largest)) * 2**32) for x in logits), 1 << 32))
    mantissa, exponent = math.frexp(total)
    log_total = fma(float(exponent - 1), float.fromhex("0x1.62e430p-1"), log1p_unit(2 * mantissa - 1))
    return [(i, sub(sub(logits[i], largest), log_total)) for i in [token, *order[:best]]]
