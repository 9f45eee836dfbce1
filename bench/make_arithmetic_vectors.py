"""Writes the test vectors of docs/arithmetic.md, computed by exact_arithmetic.py (not by the C++).

    python bench/make_arithmetic_vectors.py            prints the vector section
    python bench/make_arithmetic_vectors.py --write    replaces it in docs/arithmetic.md

Every line of a block is `inputs -> outputs`. Words of 8 hexadecimal digits are float32, of 4 float16 or bfloat16, of 16
float64; everything else is decimal.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import exact_arithmetic as exact
import exact_operations as operations
import exact_weights

DOC = Path(__file__).parent.parent / "docs" / "arithmetic.md"
BEGIN, END = "<!-- vectors -->\n", "<!-- end of vectors -->\n"

#: Integer types: ggml id, elements and bytes per block, elements per sub-block, places of float16 factors.
TYPES = {
    "Q4_0": (2, 32, 18, 32, (0,)),
    "Q4_1": (3, 32, 20, 32, (0, 2)),
    "Q5_0": (6, 32, 22, 32, (0,)),
    "Q5_1": (7, 32, 24, 32, (0, 2)),
    "Q8_0": (8, 32, 34, 32, (0,)),
    "IQ4_NL": (20, 32, 18, 32, (0,)),
    "MXFP4": (39, 32, 17, 32, ()),
    "Q2_K": (10, 256, 84, 16, (80, 82)),
    "Q3_K": (11, 256, 110, 16, (108,)),
    "Q4_K": (12, 256, 144, 32, (0, 2)),
    "Q5_K": (13, 256, 176, 32, (0, 2)),
    "Q6_K": (14, 256, 210, 16, (208,)),
    "IQ4_XS": (23, 256, 136, 32, (0,)),
}

#: Types of the float class with blocks: ggml id, elements and bytes per block, places of float16 factors.
FLOAT_TYPES = {
    "IQ2_XXS": (16, 256, 66, (0,)),
    "IQ2_XS": (17, 256, 74, (0,)),
    "IQ2_S": (22, 256, 82, (0,)),
    "IQ3_XXS": (18, 256, 98, (0,)),
    "IQ3_S": (21, 256, 110, (0,)),
    "NVFP4": (40, 64, 36, ()),
}


def f(x: float) -> str:
    return f"{exact.bits(x):08x}"


def f64(x: float) -> str:
    return struct.pack(">d", x).hex()


def noise(seed: int, n: int) -> list[float]:
    """n float32 numbers in [-1, 1): the text's noise(seed)."""
    words = (exact.philox(seed, i)[0] for i in range(n))
    return [((w ^ 0x80000000) - 0x80000000 >> 8) * 2.0**-23 for w in words]


def noise_bytes(seed: int, n: int) -> bytes:
    return bytes(exact.philox(seed, i)[0] & 255 for i in range(n))


def weight_row(name: str, seed: int, columns: int) -> bytes:
    """noise_bytes with factors that stay finite."""
    _, block, size, *_, factors = TYPES[name] if name in TYPES else FLOAT_TYPES[name]
    row = bytearray(noise_bytes(seed, columns // block * size))
    for start in range(0, len(row), size):
        for at in factors:
            row[start + at + 1] &= 0xBB
        if name == "MXFP4":
            row[start] = 120 + row[start] % 8
    return bytes(row)


FUNCTION_INPUTS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-30, -(2.0**-30), 2.0**-149, 10.0, -10.0, 17.5, -17.5, 80.25, -80.25),
    *(exact.from_bits(u) for u in (0x42B00000, 0x42B00001, 0xC2AEAC4F, 0xC2AEAC50, 0xC2AEAC51, 0x3EB17218, 0x3EB17219)),
    *(exact.from_bits(u) for u in (0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000)),
]


def function_lines() -> Iterator[str]:
    functions = (exact.exp, exact.sigmoid, exact.silu, exact.softplus)
    for x in FUNCTION_INPUTS + [exact.mul(v, 16.0) for v in noise(11, 12)]:
        yield f"{f(x)} -> {' '.join(f(function(x)) for function in functions)}"


def conversion_lines() -> dict[str, list[str]]:
    words = (0, 1, 0x3FF, 0x400, 0x3C00, 0x3555, 0x7BFF, 0x7C00, 0x7E01, 0x8000, 0x8001, 0xC000, 0xFBFF, 0xFC00)
    floats = (
        *(0x00000000, 0x80000000, 0x3F800000, 0x3F801000, 0x3F803000, 0x3F801001, 0x33000000, 0x33000001, 0x33800000),
        *(0x387FC000, 0x387FE000, 0x387FF000, 0x38800000, 0xB8802000, 0x477FDFFF, 0x477FE000, 0x477FEFFF, 0x477FF000),
        *(0xC7800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0xBEAAAAAB),
    )
    halves = [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -126.49999, 0.49999997, 4194303.5]
    return {
        "f16_to_f32": [f"{h:04x} -> {f(exact.f16_to_f32(h))}" for h in words],
        "f32_to_f16": [f"{u:08x} -> {exact.f32_to_f16(exact.from_bits(u)):04x}" for u in floats],
        "bf16_to_f32": [f"{h:04x} -> {f(exact.bf16_to_f32(h))}" for h in words],
        "round_even": [f"{f(x)} -> {f(exact.round_even(exact.from_bits(exact.bits(x))))}" for x in halves],
    }


def sum_lines() -> dict[str, list[str]]:
    eps = exact.from_bits(0x358637BD)  # 1e-6
    lengths = (1, 31, 32, 33, 64, 100, 256)
    return {
        "dot32 (n, seed of x, seed of w)": [
            f"{n} {n} {n + 1} -> {f(exact.dot32(noise(n, n), noise(n + 1, n)))}" for n in lengths
        ],
        "rms_factor (n, seed, eps)": [
            f"{n} {n} {f(eps)} -> {f(exact.rms_factor(noise(n, n), eps))}" for n in (32, 100, 256)
        ],
        "l2_factor (n, seed, eps)": [
            f"{n} {n} {f(eps)} -> {f(exact.l2_factor(noise(n, n), eps))}" for n in (32, 100, 128)
        ],
    }


def quantise_lines() -> Iterator[str]:
    for form, seed, scale in ((32, 1, 1.0), (32, 2, 2.0**-96), (32, 2, 2.0**-95), (32, 3, 2.0**127), (256, 4, 3.0)):
        q, a = exact.quantise([exact.mul(x, scale) for x in noise(seed, form)])
        yield f"{form} {seed} {f(scale)} -> {f(a)} {bytes(v & 255 for v in q).hex()}"


def product_lines() -> Iterator[str]:
    for name, (_, block, size, sub, _) in TYPES.items():
        form = 32 if block == 32 else 256
        for seed, columns in ((100, 256), (101, 2816)):
            w = exact_weights.unpack(name, weight_row(name, seed, columns), size, sub)
            x = noise(seed + 1000, columns)
            blocks = [exact.quantise(x[i : i + form]) for i in range(0, columns, form)]
            q = [v for b in blocks for v in b[0]]
            yield f"{name} {columns} {seed} -> {f(w.product(q, [b[1] for b in blocks]))}"


def float_product_lines() -> Iterator[str]:
    for name, (_, block, size, _) in FLOAT_TYPES.items():
        for seed, columns in ((200, 256), (201, 1280)):
            w = exact_weights.float_values(name, weight_row(name, seed, columns), block, size)
            yield f"{name} {columns} {seed} -> {f(exact.dot32(noise(seed + 1000, columns), w))}"


def attention_lines() -> dict[str, list[str]]:
    def words(state: tuple[float, float, list[float]]) -> str:
        return " ".join(f(x) for x in (state[0], state[1], *state[2]))

    pages, page_lines = [], []
    for seed, positions in ((1, 1), (2, 5), (3, 64)):
        scores = [exact.mul(s, 8.0) for s in noise(seed, positions)]
        pages.append(exact.page(scores, [noise(1000 * seed + p, 2) for p in range(positions)]))
        page_lines.append(f"{positions} {seed} -> {words(pages[-1])}")
    pairs = [(pages[i], pages[j]) for i, j in ((0, 1), (1, 0), (1, 2), (2, 2))]
    near = [exact.page(noise(s, 3), [noise(s + p, 2) for p in range(3)]) for s in range(20, 30)]
    pairs += list(pairwise(near))
    merge_lines = [f"{words(a)} {words(b)} -> {words(exact.merge(*a, *b))}" for a, b in pairs]
    return {"page (positions, seed)": page_lines, "merge (m1 l1 o1[2] m2 l2 o2[2])": merge_lines}


def rows_of(seed: int, count: int, n: int, factor: float = 1.0) -> list[list[float]]:
    """noise(seed), noise(seed + 1), ..., each n elements times `factor`."""
    return [[exact.mul(x, factor) for x in noise(seed + t, n)] for t in range(count)]


#: channels, taps, rows, seed.
CONVOLUTIONS = ((3, 4, 1, 1), (3, 4, 3, 1), (3, 4, 7, 2), (2, 2, 5, 3))
#: head_dim, rows, seed.
DELTAS = ((4, 1, 10), (4, 5, 20), (32, 3, 30))
#: function, experts, top_k, scale, whether there is a bias, seed.
ROUTES = (
    ("softmax", 8, 2, 1.0, False, 40),
    ("softmax", 64, 8, 1.0, False, 41),
    ("softmax", 40, 12, 2.5, False, 42),
    ("sigmoid", 8, 2, 1.0, False, 43),
    ("sigmoid", 64, 8, 2.5, True, 44),
    ("sigmoid", 40, 10, 1.0, True, 45),
)
#: positions, window, head_dim, seed.
ATTENTIONS = ((1, 0, 4, 50), (64, 0, 4, 51), (130, 0, 32, 52), (130, 70, 4, 53), (1090, 0, 4, 54), (1090, 100, 4, 55))
EPS = exact.from_bits(0x358637BD)  # 1e-6


def router_logits(seed: int, n: int) -> list[float]:
    """Multiples of 1/8, so that some are equal."""
    return [exact.round_even(exact.mul(x, 32.0)) / 8 for x in noise(seed, n)]


def operation_lines() -> dict[str, list[str]]:
    def words(values: Iterable[float]) -> str:
        return " ".join(map(f, values))

    convolutions, deltas, routes, attentions = [], [], [], []
    for channels, taps, rows, seed in CONVOLUTIONS:
        out = operations.causal_conv(rows_of(seed, rows, channels), rows_of(seed + 1000, channels, taps))
        convolutions.append(f"{channels} {taps} {rows} {seed} -> {words(out)}")
    for n, rows, seed in DELTAS:
        a, dt_bias = [exact.sub(x, 1.0) for x in noise(seed + 2000, 2)], noise(seed + 2001, 2)
        states = [[[0.0] * n for _ in range(n)] for _ in range(2)]
        for row, gates in zip(rows_of(seed, rows, 4 * n), rows_of(seed + 1000, rows, 4, 4.0), strict=True):
            heads = [
                operations.gated_delta(
                    states[h], row[:n], row[n : 2 * n], row[(2 + h) * n : (3 + h) * n],
                    gates[h], gates[2 + h], a[h], dt_bias[h], EPS,
                )
                for h in range(2)
            ]  # fmt: skip
        deltas.append(f"{n} {rows} {seed} -> {words([*heads[0][:2], *heads[1][:2]])}")
    for name, experts, top_k, scale, biased, seed in ROUTES:
        bias = noise(seed + 1000, experts) if biased else None
        chosen = operations.route(router_logits(seed, experts), bias, name == "sigmoid", top_k, scale)
        pairs = " ".join(f"{i}:{f(weight)}" for i, weight in chosen)
        routes.append(f"{name} {experts} {top_k} {f(scale)} {'bias' if biased else '-'} {seed} -> {pairs}")
    for positions, window, n, seed in ATTENTIONS:
        keys, values = rows_of(seed + 1000, positions, n, 4.0), rows_of(seed + 3000, positions, n)
        out = operations.attention([exact.mul(x, 4.0) for x in noise(seed, n)], keys, values, window, 0.5)
        attentions.append(f"{positions} {window} {n} {seed} -> {words(out[:4])}")
    return {
        "causal_conv (channels, taps, rows, seed)": convolutions,
        "gated_delta (head_dim, rows, seed)": deltas,
        "route (function, experts, top_k, scale, bias, seed -> ids and weights)": routes,
        "attention (positions, window, head_dim, seed)": attentions,
    }


def rope_lines() -> dict[str, list[str]]:
    cases = ((0, 1.0, 1.0), (1, 1.0, 1.0), (11, 1.0, 1.3465735902799727), (355, 1.0, 1.0), (262143, 0.6042963902, 1.0))
    cases += ((1, 1.5707963267948966, 1.0), (4194303, 1.0, 1.0), (4194304, 0.9999, 1.3465735902799727), (7, 1e-9, 1.0))
    tables, turns = [], []
    for position, inv_freq, magnitude in cases:
        cosine, sine = exact.rope(position, inv_freq, magnitude)
        tables.append(f"{position} {f64(inv_freq)} {f64(magnitude)} -> {f(cosine)} {f(sine)}")
        a, b = noise(position, 2)
        turned = exact.rotate(a, b, cosine, sine)
        turns.append(f"{f(a)} {f(b)} {f(cosine)} {f(sine)} -> {f(turned[0])} {f(turned[1])}")
    return {"rope (position, inv_freq, magnitude -> cosine sine)": tables, "rotate (a b cosine sine)": turns}


def sample_lines() -> Iterator[str]:
    """Logits are 16 * noise(seed of logits), so that a few tokens carry most of the weight."""
    for vocabulary, seed, temperature, top_k, top_p in (
        (300, 1, 0.0, 0, 1.0),
        (300, 1, 1.0, 0, 1.0),
        (300, 2, 0.75, 20, 0.95),
        (300, 3, 4.0, 0, 0.5),
        (300, 4, 1.0, 1, 1.0),
        (300, 5, 100.0, 0, 1.0),
    ):
        logits = [exact.mul(x, 16.0) for x in noise(seed, vocabulary)]
        ids = [exact.sample(logits, temperature, top_k, top_p, 1 << 63 | seed, index) for index in range(6)]
        yield f"{vocabulary} {seed} {f(temperature)} {top_k} {f64(top_p)} {1 << 63 | seed} -> {' '.join(map(str, ids))}"


def option_lines() -> Iterator[str]:
    """The history is ids that are likely, so that penalties move them."""
    for vocabulary, seed, temperature, top_k, min_p, repetition, presence, frequency, biases, prompt, outputs in (
        (300, 6, 0.0, 0, 0.0, 1.5, 0.0, 0.0, "", 3, 0),
        (300, 6, 0.0, 0, 0.0, 1.0, 3.5, 0.75, "", 2, 6),
        (300, 7, 1.0, 0, 0.25, 1.0, 0.0, 0.0, "", 0, 0),
        (300, 8, 1.0, 40, 0.05, 1.25, 0.5, 0.25, "5:41200000,17:c2c80000,299:41300000", 4, 8),
        (300, 9, 2.0, 0, 0.125, 0.5, -1.0, -0.5, "0:c1200000", 1, 5),
    ):
        logits = [exact.mul(x, 16.0) for x in noise(seed, vocabulary)]
        likely = sorted(range(vocabulary), key=lambda i: -logits[i])
        history = [likely[i % 4] for i in range(prompt)] + [likely[i * i % 7] for i in range(outputs)]
        bias = [(int(i), exact.from_bits(int(word, 16))) for i, word in (b.split(":") for b in biases.split(",") if b)]
        ids = [
            exact.sample(
                logits, temperature, top_k, 1.0, seed, index, min_p=min_p, bias=bias, repetition=repetition,
                presence=presence, frequency=frequency, history=history, prompt=prompt,
            )
            for index in range(6)
        ]  # fmt: skip
        yield (
            f"{vocabulary} {seed} {f(temperature)} {top_k} {f64(min_p)} {f(repetition)} {f(presence)} {f(frequency)}"
            f" {biases or '-'} {','.join(map(str, history[:prompt])) or '-'}"
            f" {','.join(map(str, history[prompt:])) or '-'} {seed} -> {' '.join(map(str, ids))}"
        )


def logprob_lines() -> Iterator[str]:
    for vocabulary, seed, token, best in ((1, 10, 0, 1), (300, 11, 7, 3), (4000, 12, 3999, 2)):
        found = exact.logprobs([exact.mul(x, 16.0) for x in noise(seed, vocabulary)], token, best)
        yield f"{vocabulary} {seed} {token} {best} -> {' '.join(f'{i}:{f(value)}' for i, value in found)}"


def philox_lines() -> Iterator[str]:
    for key, counter in ((0, 0), (2**64 - 1, 2**128 - 1), (0x299F31D0A4093822, 0x0370734413198A2E85A308D3243F6A88)):
        words = " ".join(f"{w:08x}" for w in exact.philox(key, counter))
        yield f"{key} {counter & (1 << 64) - 1} {counter >> 64} -> {words}"


def section() -> str:
    """The vector section of the document."""
    blocks: dict[str, Iterable[str]] = {
        "functions (x -> exp sigmoid silu softplus)": function_lines(),
        **conversion_lines(),
        **sum_lines(),
        "quantise (form, seed, factor -> a, q as bytes)": quantise_lines(),
        "product (type, columns, seed)": product_lines(),
        "float_product (type, columns, seed)": float_product_lines(),
        **attention_lines(),
        **rope_lines(),
        **operation_lines(),
        "philox (key, counter low, counter high)": philox_lines(),
        "sample (vocabulary, seed of logits, temperature, top_k, top_p, seed -> indices 0 to 5)": sample_lines(),
        "options (vocabulary, seed of logits, temperature, top_k, min_p, repetition, presence, frequency, biases, "
        "ids of prompt, ids of output, seed -> indices 0 to 5)": option_lines(),
        "logprobs (vocabulary, seed of logits, token, best -> token, then the best)": logprob_lines(),
    }
    return "".join(f"\n`{title}`\n\n```vectors\n{lines_of(lines)}```\n" for title, lines in blocks.items()) + "\n"


def lines_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def main(arguments: Sequence[str]) -> None:
    if arguments == ["--write"]:
        text = DOC.read_text()
        head, rest = text.split(BEGIN)
        DOC.write_text(head + BEGIN + section() + END + rest.split(END)[1])
    else:
        print(section(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
