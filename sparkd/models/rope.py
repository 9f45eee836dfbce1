"""Rotary embedding: inverse frequencies, and YaRN as decided for these files.

Everything is computed in decimal arithmetic, whose exp and ln are correctly rounded, and becomes float64 once at the
end, so that every machine gets the same bits whatever its C library.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from enum import Enum

from sparkd.errors import ConfigError, ModelFileError, UnsupportedError
from sparkd.gguf.metadata import Metadata
from sparkd.graph.ops import RopeTable

#: Far more digits than float64 has: the one rounding at the end is then the rounding of the exact value.
_PRECISION = Context(prec=50)
_PI = Decimal("3.14159265358979323846264338327950288419716939937511")
#: The YaRN paper's beta_fast and beta_slow.
_CONVENTION = (32.0, 1.0)


class Reading(Enum):
    """Which of a file's YaRN keys count (setting `numerics.yarn`).

    KEYS: betas from the file, magnitude (1 + 0.1 ln factor) * attn_factor. LLAMA: betas 32 and 1 whatever the file
    says, the same magnitude. FINAL: betas from the file, and yarn_attn_factor, where given, is the magnitude itself.
    """

    KEYS = "keys"
    LLAMA = "llama"
    FINAL = "final"

    @staticmethod
    def of(setting: str) -> Reading:
        """The reading that `numerics.yarn` names. Raises ConfigError for another word."""
        try:
            return Reading(setting)
        except ValueError:
            known = ", ".join(reading.value for reading in Reading)
            raise ConfigError(f"'{setting}' is no reading of YaRN", where="numerics.yarn", fix=f"use {known}") from None


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN scaling: context grows by `factor` from `original_context` positions."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    magnitude: float

    def range(self, base: float, n_rot: int) -> tuple[int, int]:
        """Pairs `low` and `high` between which frequencies pass from kept to interpolated."""
        with localcontext(_PRECISION):
            low = self._correction(base, n_rot, self.beta_fast).to_integral_value(ROUND_FLOOR)
            high = self._correction(base, n_rot, self.beta_slow).to_integral_value(ROUND_CEILING)
        return max(0, int(low)), min(n_rot - 1, int(high))

    def _correction(self, base: float, n_rot: int, beta: float) -> Decimal:
        """The pair that turns `beta` times within the original context: n ln(L0 / (2 pi beta)) / (2 ln base)."""
        turns = Decimal(self.original_context) / (2 * _PI * Decimal(beta))
        return n_rot * turns.ln() / (2 * Decimal(base).ln())


def rope_table(base: float, n_rot: int, yarn: Yarn | None = None) -> RopeTable:
    """Inverse frequencies base^(-2i/n_rot) of the n_rot/2 pairs; with `yarn` interpolated, and with its magnitude."""
    with localcontext(_PRECISION):
        step = -2 * Decimal(base).ln() / n_rot
        plain = [(i * step).exp() for i in range(n_rot // 2)]
        if yarn is None:
            return RopeTable(tuple(float(f) for f in plain))
        low, high = yarn.range(base, n_rot)
        width = max(Decimal("0.001"), Decimal(high - low))
        scaled = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / width, Decimal(0)), Decimal(1))
            scaled.append(f * (1 - ramp) + f / Decimal(yarn.factor) * ramp)
        return RopeTable(tuple(float(f) for f in scaled), yarn.magnitude)


def derived_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's factor on cos and sin, (1 + 0.1 ln factor) * multiplier."""
    with localcontext(_PRECISION):
        return float((1 + Decimal("0.1") * Decimal(factor).ln()) * Decimal(multiplier))


def read_yarn(metadata: Metadata, context: int, reading: Reading, notes: list[str]) -> Yarn | None:
    """The rope scaling of a file, or None when it scales nothing.

    Raises UnsupportedError for scaling that is neither none nor YaRN, ModelFileError for impossible numbers. Adds to
    `notes` where the file's keys and the values in use disagree.
    """
    prefix, where = f"{metadata.text('general.architecture')}.rope.scaling.", metadata.where

    def number(key: str, default: float, low: float, high: float) -> float:
        value = metadata.number(prefix + key, default)
        if not low <= value <= high:
            raise ModelFileError(f"{prefix}{key} is {value:g}, not within {low:g} to {high:g}", where=where)
        return value

    kind = metadata.text(prefix + "type", "linear")
    # Writers that have nothing to scale store a factor of 0.
    factor = number("factor", 1.0, 0.0, 1e6) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind != "yarn":
        raise UnsupportedError(
            f"rope scaling '{kind}' with factor {factor:g} ({prefix}type) is not supported", where=where
        )
    if factor < 1.0:
        raise ModelFileError(f"{prefix}factor is {factor:g}, YaRN needs 1 or more", where=where)
    extrapolation = metadata.number(prefix + "yarn_ext_factor", 1.0)
    if extrapolation != 1.0:
        raise UnsupportedError(f"{prefix}yarn_ext_factor is {extrapolation:g}, sparkd knows 1 only", where=where)
    original = metadata.integer(prefix + "original_context_length", context)
    if not 1 <= original <= 2**31:
        raise ModelFileError(f"{prefix}original_context_length is {original}", where=where)

    betas = (
        number("yarn_beta_fast", _CONVENTION[0], 1e-3, 1e6),
        number("yarn_beta_slow", _CONVENTION[1], 1e-3, 1e6),
    )
    used = _CONVENTION if reading is Reading.LLAMA else betas
    derived = derived_magnitude(factor, number("attn_factor", 1.0, 1e-3, 1e3))
    stated = number("yarn_attn_factor", derived, 1e-6, 1e6)
    magnitude = stated if reading is Reading.FINAL else derived
    if betas != _CONVENTION:
        notes.append(
            f"YaRN: the file says beta_fast {betas[0]:g}, beta_slow {betas[1]:g}, some programs assume 32 and 1; "
            f"{used[0]:g} and {used[1]:g} are used (numerics.yarn = {reading.value})"
        )
    # The key is float32; a rounding of the derived value is no disagreement.
    if abs(stated - derived) > 1e-6 * derived:
        notes.append(
            f"YaRN: {prefix}yarn_attn_factor is {stated:g}, factor {factor:g} gives {derived:g}; "
            f"{magnitude:g} is used (numerics.yarn = {reading.value})"
        )
    return Yarn(factor, original, used[0], used[1], magnitude)
