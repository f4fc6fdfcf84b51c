"""llama.cpp is loaded late, once, and speaks through `logging` and typed errors alone."""

from __future__ import annotations

import re
from pathlib import Path

from langchain_swarmkv.native.library import library, library_build, library_version
from tests.unit_tests.native.isolated import run_isolated


def test_importing_the_package_loads_nothing_native() -> None:
    """A process that builds graphs or settings pays for llama.cpp when it first needs it."""
    code = """
    for name in [name for name in sys.modules if name.startswith("langchain_swarmkv")]:
        del sys.modules[name]
    import langchain_swarmkv
    langchain_swarmkv.EngineConfig(model_path="nowhere.gguf")
    langchain_swarmkv.ChatSwarmKV(model_path="nowhere.gguf")
    assert "llama_cpp" not in sys.modules
    """
    assert run_isolated(code) == ""


def test_llama_cpp_is_quiet_and_logs_to_logging(tiny_llama: Path) -> None:
    """Nothing on stderr (`run_isolated` looks); what it says is there at DEBUG."""
    code = """
    import logging, sys
    lines = []
    class Keep(logging.Handler):
        def emit(self, record):
            lines.append((record.name, record.levelno, record.getMessage()))
    logging.getLogger("langchain_swarmkv").addHandler(Keep())
    logging.getLogger("langchain_swarmkv").setLevel(logging.DEBUG)
    engine = open_engine(sys.argv[1])
    append(engine, 0, [65])
    engine.close()
    assert {name for name, _, _ in lines} == {"langchain_swarmkv.native"}
    assert {level for _, level, _ in lines} == {logging.DEBUG}
    assert any("n_ctx" in text for _, _, text in lines)
    print(len(lines) > 20)
    """
    assert run_isolated(code, tiny_llama) == "True\n"


def test_errors_carry_what_llama_cpp_said_of_this_call_alone(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The reason of a failure is its own, not that of an older one."""
    whole = tiny_llama.read_bytes()
    cut, odd = tmp_path / "cut.gguf", tmp_path / "odd.gguf"
    cut.write_bytes(whole[:-1000])
    odd.write_bytes(whole.replace(b"general.architecture", b"general.architectura"))
    code = """
    import sys
    for path in sys.argv[1:]:
        try:
            LlamaTokenizer(Path(path))
        except SwarmKVError as error:
            print(error)
    """
    first, second, third = run_isolated(code, cut, odd, cut).splitlines()
    assert first == third
    assert "cut.gguf" in first
    assert "architecture" in second
    assert "architecture" not in first


def test_errors_have_a_reason_beside_another_user_of_llama_cpp(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Who takes the log of the process for itself does not take the reasons of what fails here."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_llama.read_bytes()[:-1000])
    code = """
    import ctypes, sys
    import llama_cpp
    open_engine(sys.argv[1]).close()
    listener = llama_cpp.llama_log_callback(lambda *message: None)
    llama_cpp.llama_log_set(listener, ctypes.c_void_p(0))
    try:
        LlamaTokenizer(Path(sys.argv[2]))
    except SwarmKVError as error:
        print(error)
    """
    assert "no reason given" not in run_isolated(code, tiny_llama, cut)


def test_the_build_is_told_to_the_commit() -> None:
    """One version of the Python package may sit on any llama.cpp."""
    build = re.fullmatch(r"(\S+) \(llama\.cpp (\S+), commit \S+\)", library_build())
    assert build is not None
    assert build[1] == library_version()
    assert build[2] == library().llama_version().decode()
