"""The peer of bench/tiers.py: llama.cpp through llama-cpp-python, run by the interpreter that has it.

    PYTHON tiers_peer.py MODEL.gguf TOKENS.json POSITIONS THREADS PROMPT WARM SECONDS

Reads the prompt, the first PROMPT ids of the file, then decodes the others one by one, as they stand there, for at
most SECONDS. Prints as JSON the seconds of each token after the first WARM, and the bytes read from disk meanwhile.
If there was no time for so many, the last half of the tokens counts.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import llama_cpp


def main() -> None:
    model, file, positions, threads, prompt, warm, seconds = sys.argv[1:]
    tokens = json.loads(Path(file).read_text())
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False
    settings.use_mmap = True
    weights = llama_cpp.llama_model_load_from_file(model.encode(), settings)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = int(positions), 512, 512
    context = llama_cpp.llama_init_from_model(weights, options)
    llama_cpp.llama_set_n_threads(context, int(threads), int(threads))
    decode(context, tokens[: int(prompt)])
    times: list[float] = []
    reads: list[int] = []
    until = time.perf_counter() + float(seconds)
    for token in tokens[int(prompt) :]:
        start = time.perf_counter()
        decode(context, [token])
        times.append(time.perf_counter() - start)
        reads.append(bytes_read())
        if time.perf_counter() > until:
            break
    first = min(int(warm), len(times) // 2)
    print(json.dumps({"seconds": times[first:], "read": reads[-1] - reads[first - 1] if first else reads[-1]}))


def decode(context: object, ids: list[int]) -> None:
    tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch points to it
    batch = llama_cpp.llama_batch_get_one(tokens, len(ids))
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")


def bytes_read() -> int:
    """What this process has had read from disk, faults on mapped files included."""
    return int(re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


if __name__ == "__main__":
    main()
