"""The pool that our contenders ask for holds what runs at once, however many branches there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fanout.case import Case, Document
from benchmarks.fanout.contenders.engine import Engine
from benchmarks.fanout.workloads import CaseBuilder, Sizes
from langchain_swarmkv import ChatSwarmKV


def case(branches: int) -> Case:
    prefix = tuple(range(100))
    document = Document(
        text="",
        instructions="",
        prefix=prefix,
        tasks=("",) * branches,
        prompts=tuple((*prefix, *range(10 + n % 5)) for n in range(branches)),
    )
    return Case(name="test", documents=(document,), max_tokens=32)


@pytest.mark.parametrize(("branches", "lanes"), [(1, 1), (16, 16), (200, 16), (256, 16)])
def test_the_pool_is_for_the_branches_that_run_at_once(branches: int, lanes: int) -> None:
    """More cells and sequences cost prefill and decode, and no branch would use them."""
    config = Engine(Path("m.gguf"), case(branches), {"threads": 1, **_plain()})._config()
    assert config.max_sequences == 1 + lanes + 2
    longest = 100 + lanes * (14 + 32)
    assert config.n_ctx % 256 == 0
    assert config.n_ctx <= max(512, longest + 255)
    assert config.n_ctx >= max(512, case(branches).cells_of(lanes))


def test_on_a_gpu_all_branches_run_at_once_as_far_as_there_are_sequences() -> None:
    """llama.cpp has 256."""
    settings = {"threads": 1, "gpu_layers": -1, **_plain()}
    assert Engine(Path("m.gguf"), case(200), settings)._config().max_sequences == 203
    assert Engine(Path("m.gguf"), case(256), settings)._config().max_sequences == 256


def test_a_pool_of_so_many_cells_holds_any_branches_of_that_number() -> None:
    """The longest ones count."""
    assert case(20).cells_of(2) == 100 + 2 * (14 + 32)
    assert case(20).cells_of(20) == case(20).num_cells


def test_the_scaling_workload_goes_up_to_256_branches(tiny_llama: Path) -> None:
    """And stays within the positions of the model that it is meant for."""
    with ChatSwarmKV(model_path=tiny_llama) as llm:
        builder = CaseBuilder(llm)
        assert builder.patent_case("x", 16, 256, 4).num_branches == 256
    assert "W6-d2048-b256" in _names()


def _names() -> list[str]:
    from benchmarks.fanout import workloads

    class Counted(CaseBuilder):
        def __init__(self) -> None:
            self.names: list[str] = []

        def patent_case(self, name: str, num_tokens: int, branches: int, max_tokens: int) -> Case:
            self.names.append(name)
            return case(1)

    counted = Counted()
    workloads.WORKLOADS["W6"](counted, Sizes())
    return counted.names


def _plain() -> dict[str, bool]:
    return {"prefill_flash_attention": False}
