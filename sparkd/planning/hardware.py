"""Cards and links by name, with the figures their makers state. Nothing here was measured by us.

Memory and bandwidth: product pages of NVIDIA (nvidia.com/geforce/graphics-cards, nvidia.com/data-center). Integer
operations are those of dense INT8 products on tensor cores, from the papers "NVIDIA Turing GPU Architecture", "NVIDIA
Ampere GA102 GPU Architecture", "NVIDIA Ada GPU Architecture", "NVIDIA RTX Blackwell GPU Architecture" and the data
sheets of A100, H200 and L4; for cards those papers leave out, eight (RTX 30 and later) times their stated FP32 rate, as
it is for all cards they list. Links: transfer rates of the PCI Express Base Specifications 3.0, 4.0 and 5.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.errors import ConfigError
from sparkd.residency.budget import GIB

#: The share of a link's raw rate that large copies and reads of pinned memory reach; 25 GB/s are what is usually
#: reported for PCIe 4.0 x16.
LINK_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two memories; `bandwidth` in bytes per second, as far as it can be used. `source` says whence."""

    name: str
    bandwidth: float
    source: str


def _pcie(generation: int, lanes: int) -> Link:
    giga_transfers = {3: 8, 4: 16, 5: 32}[generation]
    raw = giga_transfers * 1e9 * 128 / 130 / 8 * lanes
    source = f"{raw / 1e9:.1f} GB/s by the specification, {LINK_SHARE:.0%} of it"
    return Link(f"pcie{generation}x{lanes}", raw * LINK_SHARE, source)


LINKS: Mapping[str, Link] = {
    link.name: link for link in (_pcie(generation, lanes) for generation in (3, 4, 5) for lanes in (4, 8, 16))
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: bytes of memory, bytes per second, INT8 operations per second (2 per multiply-add), widest link."""

    name: str
    memory: int
    bandwidth: float
    operations: float
    link: str


def _gpu(name: str, gib: float, gb_s: float, tera_operations: float, link: str) -> Gpu:
    return Gpu(name, int(gib * GIB), gb_s * 1e9, tera_operations * 1e12, link)


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("rtx-2060", 6, 336, 103, "pcie3x16"),
        _gpu("rtx-3060", 12, 360, 102, "pcie4x16"),
        _gpu("rtx-3070", 8, 448, 163, "pcie4x16"),
        _gpu("rtx-3080", 10, 760, 238, "pcie4x16"),
        _gpu("rtx-3090", 24, 936, 284, "pcie4x16"),
        _gpu("rtx-4060", 8, 272, 121, "pcie4x8"),
        _gpu("rtx-4060-ti", 16, 288, 177, "pcie4x8"),
        _gpu("rtx-4070", 12, 504, 233, "pcie4x16"),
        _gpu("rtx-4080", 16, 716.8, 390, "pcie4x16"),
        _gpu("rtx-4090", 24, 1008, 661, "pcie4x16"),
        _gpu("rtx-5060-ti", 16, 448, 190, "pcie5x8"),
        _gpu("rtx-5070", 12, 672, 247, "pcie5x16"),
        _gpu("rtx-5070-ti", 16, 896, 352, "pcie5x16"),
        _gpu("rtx-5080", 16, 960, 450, "pcie5x16"),
        _gpu("rtx-5090", 32, 1792, 838, "pcie5x16"),
        _gpu("l4", 24, 300, 242, "pcie4x16"),
        _gpu("a100-40gb", 40, 1555, 624, "pcie4x16"),
        _gpu("a100-80gb", 80, 2039, 624, "pcie4x16"),
        _gpu("h200", 141e9 / GIB, 4800, 1979, "pcie5x16"),
    )
}


def find_gpu(name: str) -> Gpu:
    """The card of this name, however it is written ("RTX 3090", "3090"). ConfigError lists those there are."""
    wanted = _plain(name).removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx")
    for gpu in GPUS.values():
        if _plain(gpu.name).removeprefix("rtx") == wanted:
            return gpu
    raise ConfigError(f"no figures for a card {name[:40]!r}", fix="known ones: " + ", ".join(GPUS))


def find_link(text: str) -> Link:
    """A link by its name ("pcie4x16"), or one of so many GB/s. ConfigError lists the names."""
    named = LINKS.get(_plain(text))
    if named is not None:
        return named
    try:
        return Link(text, bandwidth(text), "as given")
    except ValueError:
        what = f"{text[:40]!r} is neither the name of a link nor its speed in GB/s"
        raise ConfigError(what, fix="known ones: " + ", ".join(LINKS)) from None


def bandwidth(text: str) -> float:
    """Bytes per second from GB/s; ValueError unless it is a number above 0 that can be reckoned with."""
    value = float(text)
    if not 1e-3 <= value <= 1e6:
        raise ValueError(f"{text} GB/s is no bandwidth")
    return value * 1e9


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
