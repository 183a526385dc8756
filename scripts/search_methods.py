"""Compare ways of searching two values of a config at equal budgets: grid, halving, Optuna.

    .venv/bin/python scripts/search_methods.py table benchmarks/search.json    # 5 CPU minutes
    .venv/bin/python scripts/search_methods.py compare benchmarks/search.json  # needs Optuna

``table`` trains a small GPT-2 (the model of the recipe ``ladder``, shrunk) at every point of a
dense grid of ``optimizer.lr`` and ``optimizer.embedding_lr_share``. Each point has a whole run,
with its losses on the way, and runs of a quarter and of half of the steps whose rate decays by
their own ends. It goes on with a file that is there. ``compare`` lets every method search that
table, with straight lines between its points on the logarithms of both values, and prints mean
regrets.

Every method has the same number of optimizer steps. Halving trains each rung from the first step;
a pruner of Optuna stops a whole run on the way, by the loss of an undecayed rate.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.interpolate import RegularGridInterpolator

from tilelab.study.ask.config import change
from tilelab.study.ask.designs import Halving
from tilelab.study.ask.run import RunSpec
from tilelab.study.recipes.ladder import learns_well
from tilelab.study.train.trainer import Diverged, Trainer
from tilewise.folders import cache_folder

STEPS = 128
SHARES = (0.25, 0.5, 1.0)  # of the steps: where a whole run is looked at, and the shorter runs
RATES = tuple(0.001 * 2.0**at for at in range(8))
EMBEDDINGS = tuple(2.0**at for at in range(6))
SMALL = {
    "model.layers": 1, "model.width": 64, "model.heads": 2, "model.context": 64,
    "evaluation.final_stride": 0, "evaluation.windows": 64, "evaluation.text": "tuning",
}  # fmt: skip
BUDGETS = (6, 9, 12, 16, 25)  # in whole runs
WORST = 8.0  # bits per byte of a run that diverged


def table(path: Path) -> None:
    """Train what the file lacks, and put it there point by point."""
    torch.set_num_threads(1)
    known = json.loads(path.read_text()) if path.exists() else {"points": {}}
    base = change(learns_well("stdlib", 1), SMALL)
    data = base.learning.prepare(base, cache_folder())
    for rate in RATES:
        for share in EMBEDDINGS:
            name = f"{rate:g} {share:g}"
            if name in known["points"]:
                continue
            began = time.process_time()
            both = {"optimizer.lr": rate, "optimizer.embedding_lr_share": share}
            config = change(base, both)
            whole, *shorter = (_losses(config, part, data) for part in (1.0, 0.25, 0.5))
            short = [each[-1] for each in shorter]
            cpu_s = round(time.process_time() - began, 2)
            known["points"][name] = {"on_the_way": whole, "short": short, "cpu_s": cpu_s}
            path.write_text(json.dumps(known, indent=1) + "\n")
            print(name, known["points"][name], flush=True)


def _losses(config: Any, part: float, data: Any) -> list[float]:
    """Return bits per byte of one run, of a part of the steps, at the shares of the whole."""
    steps = round(part * STEPS)
    run = RunSpec("search", "arm", 1000, change(config, {"budget.steps": steps}))
    trainer = Trainer(run, data, torch.device("cpu"))
    examined = trainer.task.examination(run.config, data)
    found = []
    for at in (round(share * STEPS) for share in SHARES if share <= part):
        try:
            while trainer.done < at:
                trainer.step()
            held = examined.held_out(trainer.model, False, torch.bfloat16)
            trainer.model.train()
            found.append(min(held.bits_per_byte or WORST, WORST))
        except Diverged:
            found.append(WORST)
    return found


class Table:
    """The losses between the points of the grid; x and y are the values' places on it."""

    def __init__(self, path: Path, noise: float = 0.0) -> None:
        self._noise = noise  # bits per byte that seeds differ by; a search sees it
        points = json.loads(path.read_text())["points"]
        shape = len(RATES), len(EMBEDDINGS), 5
        rows = [points[f"{rate:g} {share:g}"] for rate in RATES for share in EMBEDDINGS]
        at = np.array([[*each["on_the_way"], *each["short"]] for each in rows]).reshape(shape)
        self._between = RegularGridInterpolator((range(shape[0]), range(shape[1])), at)
        self.top = len(RATES) - 1.0, len(EMBEDDINGS) - 1.0
        self.best = float(at[..., 2].min())

    def _of(self, x: float, y: float, column: int) -> float:
        return float(self._between((x, y))[column])

    def true(self, x: float, y: float) -> float:
        """Return the loss at the end of a whole run, without noise."""
        return self._of(x, y, 2)

    def on_the_way(self, x: float, y: float, look: int) -> float:
        """Return the loss of a whole run at a look (2: its end)."""
        return self._of(x, y, look) + self._luck(x, y, 2)

    def of_length(self, x: float, y: float, rung: int) -> float:
        """Return the last loss of a run of so long."""
        return self._of(x, y, 2 if rung == 2 else 3 + rung) + self._luck(x, y, rung)

    def _luck(self, x: float, y: float, rung: int) -> float:
        rng = np.random.default_rng([round(x * 1e6), round(y * 1e6), rung])
        return self._noise * float(rng.standard_normal())


Search = Callable[[Table, int, int], tuple[float, float]]  # table, whole runs, seed -> x, y


def grid(found: Table, budget: int, seed: int) -> tuple[float, float]:
    """The best of a grid that is shifted at random, as its user might have laid it."""
    return min(_grid(found, budget, seed), key=lambda each: found.on_the_way(*each, 2))


def _grid(found: Table, count: int, seed: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    u, v = rng.random(2)
    places = [((i + u) / columns, (j + v) / rows) for i in range(columns) for j in range(rows)]
    rng.shuffle(places)
    return [(x * found.top[0], y * found.top[1]) for x, y in places[:count]]


def random(found: Table, budget: int, seed: int) -> tuple[float, float]:
    """The best of points at random."""
    rng = np.random.default_rng(seed)
    places = [tuple(rng.random(2) * found.top) for _ in range(budget)]
    return min(places, key=lambda each: found.on_the_way(*each, 2))


def halving(found: Table, budget: int, seed: int) -> tuple[float, float]:
    """Successive halving of studies, three rungs, from a grid of as many as the budget allows."""
    rule = Halving(eta=2, rungs=3)

    def cost(count: int) -> int:
        return sum(rule.candidates(count, rung) * rule.steps(STEPS, rung) for rung in range(3))

    count = max(n for n in range(4, 1000) if cost(n) <= budget * STEPS)
    left = _grid(found, count, seed)
    for rung in range(3):
        left = sorted(left, key=lambda each: found.of_length(*each, rung))
        left = left[: rule.candidates(count, rung + 1)] if rung < 2 else left
    return left[0]


def optuna_search(sampler: str, pruner: str = "") -> Search:
    """Optuna with one of its samplers, pruned on the way or not, until the steps are spent."""

    def search(found: Table, budget: int, seed: int) -> tuple[float, float]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        first = max(3, budget // 3)
        samplers = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=first),
            "tpe, as it comes": lambda: optuna.samplers.TPESampler(seed=seed),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=first),
        }
        pruners = {
            "": optuna.pruners.NopPruner,
            "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2),
            "hyperband": lambda: optuna.pruners.HyperbandPruner(1, 4, reduction_factor=2),
        }
        study = optuna.create_study(sampler=samplers[sampler](), pruner=pruners[pruner]())
        spent, ends = 0.0, dict[tuple[float, float], float]()
        while spent < budget - 1e-9:
            trial = study.ask()
            at = tuple(
                trial.suggest_float(name, 0, top) for name, top in zip("xy", found.top, strict=True)
            )
            for look, share in enumerate(SHARES):
                part = share - (SHARES[look - 1] if look else 0)
                if spent + part > budget + 1e-9:
                    spent = budget  # what is left is not enough
                    break
                spent += part
                loss = found.on_the_way(*at, look)
                trial.report(loss, round(4 * share))
                if look < 2 and trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    break
                if look == 2:
                    study.tell(trial, loss)
                    ends[at] = loss
        return min(ends, key=ends.__getitem__) if ends else at

    return search


METHODS: dict[str, Search] = {
    "random": random,
    "grid": grid,
    "halving": halving,
    "TPE": optuna_search("tpe"),
    "TPE, 10 at random": optuna_search("tpe, as it comes"),
    "TPE, halving pruner": optuna_search("tpe", "halving"),
    "TPE, Hyperband": optuna_search("tpe", "hyperband"),
    "GP": optuna_search("gp"),
}


def compare(path: Path, repeats: int, noise: float) -> None:
    """Print a row a budget: mean regret (its standard error) of every method."""
    found = Table(path, noise)
    print(f"best of the table: {found.best:.3f} bits per byte")
    print("| whole runs |", " | ".join(METHODS), "|")
    for budget in BUDGETS:
        print(f"| {budget} |", " | ".join(_cells(found, budget, repeats)), "|", flush=True)


def _cells(found: Table, budget: int, repeats: int) -> Iterator[str]:
    for name, search in METHODS.items():
        some = min(repeats, 20) if name == "GP" else repeats  # a GP is slow
        regrets = [found.true(*search(found, budget, seed)) - found.best for seed in range(some)]
        error = statistics.stdev(regrets) / math.sqrt(len(regrets))
        yield f"{statistics.fmean(regrets):.4f} ({error:.4f})"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("table", "compare"))
    parser.add_argument("path", type=Path, help="of the table")
    parser.add_argument("--repeats", type=int, default=100, help="searches of each method (100)")
    parser.add_argument("--noise", type=float, default=0.0, help="that seeds differ by (0)")
    options = parser.parse_args()
    if options.what == "table":
        table(options.path)
    else:
        compare(options.path, options.repeats, options.noise)


if __name__ == "__main__":
    main()
