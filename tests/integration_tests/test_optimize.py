"""`swarmkv optimize` on a real model: the result loads and answers as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_swarmkv import EngineConfig, SamplingParams, SwarmEngine, cli


@pytest.mark.timeout(600)
def test_smollm2_as_q8_0_decodes(smollm2: Path, tmp_path: Path) -> None:
    """Larger by the bits, and it still knows the capital of France."""
    out = tmp_path / "smollm2.gguf"
    result = CliRunner().invoke(cli.app, ["optimize", str(smollm2), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Q4_1 is quantised already" in result.stdout
    assert 1.4 < out.stat().st_size / smollm2.stat().st_size < 1.6
    for path in (smollm2, out):
        with SwarmEngine(EngineConfig(model_path=path, n_ctx=256, n_threads=1)) as engine:
            prompt = engine.tokenizer.encode("The capital of France is")
            answer = engine.submit(prompt, SamplingParams(max_tokens=3)).result()
            assert answer.text.startswith(" Paris"), path
