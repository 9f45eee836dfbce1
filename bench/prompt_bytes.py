"""Bytes of experts that a recorded prompt has sent over a link, against those that it cannot do without.

    python bench/prompt_bytes.py

Replays `bench/prompt_routing.py`'s recording through a device tier, after some tokens were decoded, with steps of 512
to 2,048 rows. No kernel runs, and no card is needed: what is counted are copies. The lower bound are the different
experts that the rows of a step chose in a layer and no slot held.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sparkd.residency.device_budget import ROWS, STAGING_PARTS, staging_slots

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("emulator", "unit", "integration")]
SHARES = (0.1, 0.4, 0.6)


def main() -> None:
    """Print the table."""
    from prompt_replay import Recording, Replay, arena_for

    recording = Recording.load()
    top_k = recording.decode.shape[2]
    print("| rows a step | experts in slots | least, MB | over the link, MB | more | early, at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, arena_for(recording, Path(folder)) as arena:
        sizes = sum(arena.layout.slabs[layer.slab].record_bytes for layer in arena.layout.layers)
        for rows in ROWS:
            for share in SHARES:
                replay = Replay(arena, share, rows, 1)
                replay.decode(recording.decode[:256])
                steps = recording.steps(rows)
                replay.prompt(steps)
                came, least = replay.tier.streamed, replay.least
                early = STAGING_PARTS * staging_slots(top_k, rows) * sizes * len(steps)
                cells = [rows, f"{share:.0%}", f"{least / 1e6:.1f}", f"{came / 1e6:.1f}", f"{came / least - 1:.2%}"]
                print("| " + " | ".join(map(str, [*cells, f"{min(1.0, early / came):.0%}"])) + " |", flush=True)


if __name__ == "__main__":
    main()
