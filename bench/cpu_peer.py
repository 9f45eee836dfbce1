"""The peer of bench/cpu.py: llama.cpp through llama-cpp-python, run by the interpreter that has it.

    PYTHON cpu_peer.py MODEL.gguf POSITIONS REPACK

Reads "threads prefill decode" from each line of its input: reads a prompt of `prefill` tokens, then decodes `decode`
tokens one by one. Answers with the seconds of both, on the clock and of processor time.
"""

from __future__ import annotations

import sys
import time

import llama_cpp


def main() -> None:
    model, positions, repack = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = repack
    weights = llama_cpp.llama_model_load_from_file(model.encode(), settings)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = positions, 512, 512
    context = llama_cpp.llama_init_from_model(weights, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    for line in sys.stdin:
        threads, prefill, decode = map(int, line.split())
        llama_cpp.llama_set_n_threads(context, threads, threads)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        figures = []
        for count, at_once in ((prefill, 512), (decode, 1)):
            start, used = time.perf_counter(), time.process_time()
            for first in range(0, count, at_once):
                ids = [(first + i) * 7919 % vocabulary for i in range(min(at_once, count - first))]
                tokens = (llama_cpp.llama_token * len(ids))(*ids)
                batch = llama_cpp.llama_batch_get_one(tokens, len(ids))
                if llama_cpp.llama_decode(context, batch) != 0:
                    raise SystemExit("llama_decode failed")
            figures += [time.perf_counter() - start, time.process_time() - used]
        print(*figures, flush=True)


if __name__ == "__main__":
    main()
