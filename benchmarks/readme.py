"""Write figures and pictures of the README from the files that the benchmarks wrote.

All numbers between the two marks in README.md come from `benchmarks/results`; nothing there is
edited by hand, and a test holds that. `docs/fanout-*.svg` are drawn from the same files.

    python -m benchmarks.readme
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fanout.plots import plot_results

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"

NAMES = {
    "fresh-context": "a fresh context for each analyst",
    "mutex": "one `Llama` behind a lock",
    "chat-llama-cpp": "`ChatLlamaCpp` behind a lock",
    "llama-server": "llama.cpp's server",
    "copy-per-branch": "a copy of the KV for each branch",
    "transformers": "transformers, a copied `DynamicCache`",
    "example-server": "llama-cpp-python's example server",
    "engine": "**this package**: engine",
    "chat-model": "**this package**: chat model",
    "graph": "**this package**: whole graph",
    "floor": "the floor",
}

Result = dict[str, Any]


def main() -> None:
    """Replace what stands between the marks, and draw."""
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(before + BEGIN + figures() + END + after, encoding="utf-8")
    plot_results(_load("fanout-W2"), ROOT / "docs" / "fanout-contenders.svg")
    plot_results(_load("fanout-W6"), ROOT / "docs" / "fanout.svg")


def figures() -> str:
    """The text between the marks."""
    lines = [*_fan_out(_load("fanout-W2"), _load("fanout-W2-q4_0")), "", *_others()]
    return "\n".join(lines) + "\n"


def _load(name: str) -> Result:
    result: Result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _fan_out(result: Result, fast: Result) -> Iterator[str]:
    workload, cases = result["workload"], result["cases"]
    (fast_case,) = fast["cases"]
    quick = {contender["name"]: contender for contender in fast_case["contenders"]}
    quick_floor = _seconds(fast_case, "floor")
    yield (
        f"Here: {workload['document_tokens']:,} tokens of a US patent, {workload['branches']} "
        f"analysts x {workload['max_tokens']} tokens, {result['model']['name'].split('-I')[0]}, "
        f"{result['machine']['cores']} CPU cores, no GPU, on two machines: {_where(result)}, the "
        "file as it is shipped, which has no fast kernels, each contender at the settings that "
        f"were fastest for it; and {_where(fast)}, the same weights as `swarmkv optimize` repacks "
        "them, with the default settings (one kernel). All runs, settings, machines and versions: "
        "[benchmarks/results](benchmarks/results)."
    )
    yield ""
    yield (
        f"| contender | {_where(result)}: seconds (range) | times the floor | {_where(fast)}: "
        "seconds (range) | times the floor | prompt tokens computed | peak MB |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    floor = _seconds(cases[0], "floor")
    for contender in cases[0]["contenders"]:
        name, seconds = contender["name"], contender["median_seconds"]
        label = NAMES[name]
        if name == "llama-server":
            slots = contender["settings"]["slots"]
            label += f", {slots} slot{'s' if slots > 1 else ''}"
        if contender["settings"].get("prefill_flash_attention"):
            label += ", two kernels"
        again = quick.get(name)
        second = "| | |"
        if again is not None:
            again_seconds = again["median_seconds"]
            second = (
                f"| {again_seconds:.1f} ({_range(again['seconds'])}) | "
                f"{again_seconds / quick_floor:.2f} |"
            )
        yield (
            f"| {label} | {seconds:.1f} ({_range(contender['seconds'])}) | "
            f"{seconds / floor:.2f} {second} {contender['computed_tokens']:,} | "
            f"{contender['peak_rss_bytes'] / 1e6:.0f} |"
        )


def _where(result: Result) -> str:
    """Number format and the widest vectors that llama.cpp used."""
    file_type = result["model"]["name"].removesuffix(".gguf").rsplit(".", 1)[1]
    features = result["machine"]["llama_cpp_features"]
    return f"{file_type}, {'AVX-512' if 'AVX512 = 1' in features else 'AVX2'}"


def _others() -> Iterator[str]:
    w1, w3, w4, w5 = (_load(f"fanout-W{number}") for number in (1, 3, 4, 5))
    cold, warm = w4["cases"]
    computed_tokens = _contender(cold, "chat-model")["computed_tokens"]
    yield (
        f"- **One prefill, whoever asks.** {_named(cold['workload']['branches'])} plain calls that "
        f"arrive at once on a cold engine compute {computed_tokens:,} prompt tokens together, one "
        "document and their questions, and take "
        f"{_seconds(cold, 'chat-model'):.1f} s; one that prefills the document first, and then "
        f"lets them ask, {_seconds(warm, 'chat-model'):.1f} s, the prefill included."
    )
    yield (
        "- **Idle documents do not slow down the others.** Four documents with four readers each, "
        "with four other documents cached and with none: " + _interleaved(*w5["cases"]) + "."
    )
    (fifty,) = w3["cases"]
    wave = _contender(fifty, "floor")["settings"]["wave"]
    yield (
        f"- **{_named(fifty['workload']['branches'])} branches** of "
        f"{fifty['workload']['max_tokens']} tokens: whole graph {_seconds(fifty, 'graph'):.1f} s, "
        f"engine {_seconds(fifty, 'engine'):.1f} s, both with the default of 16 at once; the floor "
        f"{_seconds(fifty, 'floor'):.1f} s, in waves of {wave}, its fastest."
    )
    yield from _scaling(_load("fanout-W6"))
    yield from _snapshots(_load("restart"))
    (article,) = w1["cases"]
    fresh, graph = _seconds(article, "fresh-context"), _seconds(article, "graph")
    fields = article["article"]
    yield (
        "- **The article's own workload** (SwarmKV, Towards Data Science, June 2026; "
        f"{article['workload']['document_tokens']:,} "
        f"tokens, {article['workload']['branches']} branches): fresh contexts {fresh:.1f} s, whole "
        f"graph {graph:.1f} s, {fresh / graph:.2f} times faster; the second branch is active "
        f"after {fields['branch_2_activation_seconds']:.2f} s instead of a prefill of "
        f"{fields['branch_2_prefill_seconds']:.1f} s, {fields['activation_ratio']:.0f} times "
        "sooner (its authors report 1.95 and 52 on a GPU)."
    )
    floor, python = _load("floor"), _load("python_share")
    yield (
        f"- **Next to the floor.** Engine and floor in one process, {floor['branches']} branches x "
        f"{floor['max_tokens']} tokens, medians of {len(floor['seconds']['engine'])}: the engine "
        f"takes {floor['ratio']:.2f} of the floor's time. Of a greedy decode step of "
        f"{python['branches']} branches Python takes {100 * python['event loop']['share']:.0f} %."
    )
    yield _counting(_load("token_counting"))


def _counting(result: Result) -> str:
    speeds = {
        case["kind"]: case["megabytes_per_second"]
        for case in result["cases"]
        if case["size"] == "2 MB"
    }
    told = ", ".join(
        f"{kind} {speeds[kind]['tiktoken']:.1f} MB/s instead of {speeds[kind]['llama.cpp']:.1f}"
        for kind in ("English", "code", "Chinese")
    )
    return (
        f"- **Counting tokens.** Long texts are counted with tiktoken: {told}. That its ids are "
        f"llama.cpp's is proved once for each vocabulary, in {result['proof_seconds']:.1f} s, when "
        "enough has been counted to make that pay; neither loads weights or waits for the device."
    )


def _snapshots(result: Result) -> Iterator[str]:
    restart, rotation = result["restart"], result["rotation"]
    seconds = restart["median_ttft_seconds"]
    yield (
        f"- **The next process.** It finds a document of {result['document_tokens']:,} tokens on "
        f"disk ({restart['file_bytes'] / 1e6:.0f} MB) and has the first token of an answer after "
        f"{seconds['disk']:.2f} s; one that prefills it, after {seconds['prefill']:.1f} s: "
        f"{restart['ratio']:.0f} times sooner (medians of "
        f"{len(restart['ttft_seconds']['disk'])} processes each, engine loaded)."
    )
    tiers = {"resident": "the pool", "memory": "memory", "disk": "disk", "none": "a prefill"}
    asked = ", ".join(
        f"{rotation['from'][tier]} from {place} ({rotation['median_ttft_seconds'][tier]:.2f} s)"
        for tier, place in tiers.items()
    )
    yield (
        f"- **More documents than fit.** {rotation['documents']} documents of "
        f"{rotation['document_tokens']:,} tokens through a pool for three, with memory for three "
        f"more; of {rotation['asked']} questions (median time to first token): {asked}."
    )


def _scaling(result: Result) -> Iterator[str]:
    cases = {case["workload"]["name"]: case for case in result["cases"]}
    sizes = [cases[f"W6-d2048-b{branches}"] for branches in (1, 16, 64)]
    seconds, megabytes = (
        {
            name: ", ".join(f"{_contender(case, name)[field] * unit:.{digits}f}" for case in sizes)
            for name in ("engine", "mutex")
        }
        for field, unit, digits in (("median_seconds", 1, 1), ("peak_rss_bytes", 1e-6, 0))
    )
    num_runs = len(_contender(sizes[0], "engine")["seconds"])
    yield (
        "- **More branches.** 1, 16 and 64 branches of "
        f"{sizes[0]['workload']['max_tokens']} tokens over 2,048 tokens take {seconds['engine']} s "
        f"and {megabytes['engine']} MB at most; one model behind a lock {seconds['mutex']} s and "
        f"{megabytes['mutex']} MB ({'one run' if num_runs == 1 else f'{num_runs} runs'} each). "
        "Most of the time of the first is the document's prefill, which all share: the longer the "
        "document and the shorter the answers, the less there is to win."
    )


def _interleaved(empty: Result, cached: Result) -> str:
    told = []
    for contender in cached["contenders"]:
        name = contender["name"]
        label = NAMES[name].replace("**this package**: ", "").replace("llama-cpp-python's ", "the ")
        if contender["error"]:
            told.append(f"{label} failed")
        else:
            told.append(
                f"{label} {_seconds(cached, name):.1f} and {_seconds(empty, name):.1f} s "
                f"({contender['peak_rss_bytes'] / 1e6:.0f} MB)"
            )
    return "; ".join(told)


def _contender(case: Result, name: str) -> Result:
    (found,) = (contender for contender in case["contenders"] if contender["name"] == name)
    return dict(found)


def _seconds(case: Result, name: str) -> float:
    return float(_contender(case, name)["median_seconds"])


def _range(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return "one run"
    return f"{min(seconds):.1f}-{max(seconds):.1f}"


def _named(number: int) -> str:
    return {8: "Eight", 50: "Fifty"}.get(number, str(number))


if __name__ == "__main__":
    main()
