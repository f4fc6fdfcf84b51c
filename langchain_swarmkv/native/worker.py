"""What `worker_process` runs: `load PATH`, or `quantize SOURCE TARGET FILE_TYPE NUM_THREADS`.

It is run by its path and imports llama_cpp alone, which takes a sixth of the time of the package.
Prints `tensor I N` for each tensor that it begins to convert, and what llama.cpp logs as errors.
The exit code is 0 if it was done.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any

_GGML_LOG_LEVEL_ERROR = 4  # enum ggml_log_level, ggml.h
_TENSOR = re.compile(rb"\[\s*(\d+)/\s*(\d+)\] ")


def main(task: str, *arguments: str) -> int:
    """Do one task; the exit code."""
    import llama_cpp

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, user_data: object) -> None:
        if tensor := _TENSOR.match(text):
            _say(f"tensor {int(tensor[1])} {int(tensor[2])}")
        elif level == _GGML_LOG_LEVEL_ERROR and text.strip():
            _say(text.decode("utf-8", errors="replace").strip())

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    return (_load if task == "load" else _quantize)(llama_cpp, *arguments)


def _load(llama_cpp: Any, path: str) -> int:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return 1
    if not llama_cpp.llama_model_has_decoder(model) or llama_cpp.llama_model_has_encoder(model):
        return 0  # the caller says so
    return _try_decoding(llama_cpp, model)


def _try_decoding(llama_cpp: Any, model: Any) -> int:
    """Decode two tokens, then one: a prefill and a step, with which some models end the process."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return 1
    for tokens in ([0, 0], [0]):
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens)))
        if code:
            _say(f"llama_decode returned {code}")
            return 1
    return 0


def _quantize(llama_cpp: Any, source: str, target: str, file_type: str, n_threads: str) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.nthread = int(n_threads)
    params.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would stand for others of their names
    sys.exit(main(*sys.argv[1:]))
