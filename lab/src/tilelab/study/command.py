"""``tilewise study``: run a study, and look at those that were run.

Exit status:

* 0: done;
* 1: something is wrong (a run failed, a file is damaged, no memory, a full disk, a systems arm that
  changed what is learnt);
* 2: wrong usage;
* 75: time is up (``--minutes``): the same command goes on;
* 130: stopped with Ctrl-C (the command reports what was done by then).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from tilelab.common.terminal import positive, say
from tilelab.study import recipes
from tilelab.study.ask import overrides
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import Execution, Strategy
from tilelab.study.ask.values import Kind, find, names, nearest
from tilelab.study.browse import compare, show, table
from tilelab.study.conduct import conductor, predict
from tilelab.study.records import store
from tilelab.study.train.export import export
from tilelab.study.train.state import CHECKPOINT
from tilewise.commands import visible
from tilewise.errors import InvalidArgument

DEFAULT, DEMO = "laptop", "kernels"
_WIDTH = 160  # of tables where there is no terminal that has one


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, ``run`` if none is named; return the exit status (see the module).

    Raises:
        TilewiseError: what a user can put right, but for wrong usage.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    subcommand = SUBCOMMANDS.get(given[0]) if given else None
    try:
        return subcommand(given[1:]) if subcommand else _run(given)
    except InvalidArgument as error:
        print(visible(f"tilewise study: {error}"), file=sys.stderr)
        return 2


def demo(argv: Sequence[str] | None = None) -> int:
    """``tilewise demo``: the study of the kernels; arguments and status as for ``main``."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run([DEMO, *given], _demo_parser())
    except InvalidArgument as error:
        print(visible(f"tilewise demo: {error}"), file=sys.stderr)
        return 2


def _run(argv: Sequence[str], parser: argparse.ArgumentParser | None = None) -> int:
    parser = parser or _parser()
    options, rest = parser.parse_known_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        came, required = "a start by torchrun", "a start without it, and --processes N"
        fix = "A study has many runs, and starts the processes of each itself."
        raise InvalidArgument("tilewise study", came, required, fix)
    name, texts = _recipe(parser, rest)
    recipe = recipes.find(name)
    _check_options(texts, (*recipe.options, *vars(options)))
    values = {
        key: text if isinstance(recipe.options.get(key), str) else overrides.json_or_text(text)
        for key, text in texts.items()
    }
    study = overrides.apply(recipe.study(**values), options.set)
    console = _console()
    for note in overrides.notes(study, options.set):
        say(console, f"Note: {note}.")
    if options.dry_run:
        return _dry_run(study, options.chip, console)
    if options.chip:
        raise InvalidArgument("--chip", repr(options.chip), "--dry-run too: it is predicted for")
    names = ("threads", "device", "processes", "strategy")
    how = {name: getattr(options, name) for name in names}
    how["context"] = options.context_parallel
    return conductor.Conductor(
        study=study,
        command=shlex.join(["tilewise", "study", "run", *argv] if argv else _BARE),
        out=options.out,
        jobs=options.jobs,
        on=options.on,
        track=tuple(options.track),
        one_process=options.one_process,
        minutes=options.minutes,
        confirm=None if options.yes or not sys.stdin.isatty() else _confirm,
        execution=Execution(**how),
        underpowered=options.underpowered,
    ).conduct(console)


def _dry_run(study: Study, chip: str | None, console: Console) -> int:
    name = chip or study.chip
    if not name and any(each.baseline.learning.external for each in study.experiments):
        console.print(predict.dry_run_of_script(study))
        return 0
    if not name:
        came, fix = f"{study.name}, which names no chip", "For example: --chip h200."
        raise InvalidArgument("--dry-run", came, "the GPU to predict for, --chip NAME", fix)
    console.print(predict.dry_run(study, predict.gpu_named(name)))
    return 0


_BARE = ["tilewise", "study", "run", DEFAULT]


def _recipe(parser: argparse.ArgumentParser, rest: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the recipe's name and options: what is no option of the command, ``--preset h200``."""
    name: str | None = None
    options: dict[str, str] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if name is not None:
                parser.error(f"{name!r} and {word!r}: one recipe at a time")
            name = word
            continue
        key, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                parser.error(f"{word}: give it a value")
            value = words.pop(0)
        options[key.replace("-", "_")] = value
    return DEFAULT if name is None else name, options


def _check_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that the recipe lacks; it may be a misspelled one of the command."""
    spelled = [f"--{key.replace('_', '-')}" for key in known]
    for option in (f"--{key.replace('_', '-')}" for key in given):
        if option not in spelled:
            required = f"one of {', '.join(spelled)}"
            fix = nearest(option, spelled)
            raise InvalidArgument(option, "an option that is not known", required, fix)


def _confirm(duration: str) -> bool:
    try:
        answer = input(f"This will take about {duration}. Start? [y/N] ")
    except EOFError:  # Ctrl-D
        return False
    return answer.strip().lower() in ("y", "yes")


def _recipes(argv: Sequence[str]) -> int:
    _no_arguments("recipes", "the studies that are ready to run", argv)
    console = _console()
    for name in recipes.names():
        recipe = recipes.find(name)
        default = " (the default)" if name == DEFAULT else ""
        say(console, f"{name}{default}", style="bold")
        say(console, f"  {recipe.summary}")
        options = [f"--{key.replace('_', '-')} {value}" for key, value in recipe.options.items()]
        if options:
            say(console, f"  {'  '.join(options)}", style="dim")
    return 0


def _choices(argv: Sequence[str]) -> int:
    _no_arguments("choices", "the tasks, optimizers, schedules and variants there are", argv)
    console = _console()
    kinds: tuple[Kind, ...] = ("task", "optimizer", "schedule", "variant")
    for kind in kinds:
        say(console, f"{kind}.name", style="bold")
        for name in names(kind):
            entry = find(kind, name)
            say(console, f"  {name}: {entry.summary}")
            if entry.defaults:
                options = ", ".join(f"{key}={value}" for key, value in entry.defaults.items())
                say(console, f"    {options}", style="dim")
    return 0


def _report(argv: Sequence[str]) -> int:
    parser = _sub("report", "write the report of a study again, from its records")
    parser.add_argument("study", help="its name or folder")
    options = parser.parse_args(argv)
    conductor.report_again(show.find_study(options.study, options.out), _console())
    return 0


def _list(argv: Sequence[str]) -> int:
    options = _sub("list", "all studies, the newest first").parse_args(argv)
    show.list_studies(options.out, _console())
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = _sub("show", "everything that is known of a run, or the runs of an arm or a study")
    parser.add_argument("run", help="e.g. choices/lion/seed-0, choices/lion, or laptop")
    options = parser.parse_args(argv)
    show.show(show.find(options.run, options.out), _console())
    return 0


def _compare(argv: Sequence[str]) -> int:
    parser = _sub("compare", "two arms, runs or studies, paired where their seeds match")
    parser.add_argument("a", help="e.g. choices/lion")
    parser.add_argument(
        "b", help="e.g. choices/wsd, or an arm of another study: laptop:choices/wsd"
    )
    options = parser.parse_args(argv)
    first, second = (show.find(name, options.out) for name in (options.a, options.b))
    compare.compare(first, second, _console())
    return 0


def _export(argv: Sequence[str]) -> int:
    parser = _sub("export", "write the weights of a finished run in the Hugging Face layout")
    parser.add_argument("run", help="e.g. choices/lion/seed-0, or laptop:choices/lion/seed-0")
    parser.add_argument("folder", type=Path, help="for config.json and model.safetensors")
    options = parser.parse_args(argv)
    run, record = show.find_run(options.run, options.out)
    found = export(record, run / CHECKPOINT, options.folder)
    console = _console()
    what = f"{record.start.run} after step {found.step}: a model of type {found.kind}"
    say(console, f"{what} in {options.folder}.")
    if found.kind != found.family:
        module = f"tilelab.models.{found.family}"
        say(console, f"transformers has none of this type; {module} loads it.")
    if found.family != "gpt2":
        say(console, f"A run begins with it by --set model.checkpoint={options.folder}")
    return 0


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "recipes": _recipes,
    "choices": _choices,
    "report": _report,
    "list": _list,
    "show": _show,
    "compare": _compare,
    "verdict": lambda argv: table.main(argv, _console()),
    "export": _export,
}


def completion_names() -> dict[str, list[str]]:
    """Return, by command of ``tilewise``, the names that the shell's TAB key offers after it."""
    from tilelab.bench.command import NAMES  # slow to import, and nothing else here needs it

    return {"bench": list(NAMES), "study": [*recipes.names(), *SUBCOMMANDS]}


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else _WIDTH, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise study",
        usage="tilewise study [run] [RECIPE | FILE.py[:FUNCTION]] [options] [its options]\n"
        "       tilewise study recipes | choices | list\n"
        "       tilewise study report STUDY | show RUN | compare A B | export RUN FOLDER\n"
        "       tilewise study verdict TABLE --arm COLUMN --metric COLUMN --baseline ARM ...",
        description="Train arms that differ in one choice, with paired seeds, and say which "
        "choices are worth having. The same command goes on with a study that was stopped. "
        f"The recipe is {DEFAULT} if none is named.",
        epilog="`tilewise study recipes` says what a recipe's options are, e.g. --preset h200.",
        allow_abbrev=False,
    )
    return _with_options(parser)


def _demo_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise demo",
        usage="tilewise demo [--text FILE] [--context N] [--steps N] [--seeds N] "
        "[--long-context N] [options]",
        description="Train the same model with plain attention, torch's fused one and tilewise: "
        f"are the losses equal, and what do speed and memory gain? Short for `tilewise study run "
        f"{DEMO}`; the same command goes on with a run that was stopped.",
        epilog="--text: a text file or a folder of them, in place of Python's standard library. "
        "--context: tokens that attend to one another (1024). --steps: of every run (20). "
        "--seeds: how many, paired (3).",
        allow_abbrev=False,
    )
    return _with_options(parser)


def _with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = parser.add_argument
    add(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a value, e.g. optimizer.lr=0.001, seeds=0,1, kernels.budget.steps=5 (repeat)",
    )
    add("--jobs", type=positive, metavar="N", help="runs at once (as many as there are cores)")
    add("--threads", type=positive, default=1, metavar="N", help="of each run (1, pinned)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where runs train (cpu)")
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="that train each run together, each on a device of its own (1): docs/scaling.md",
    )
    add(
        "--one-process",
        action="store_true",
        help="run after run in one process, which compiles once: docs/scaling.md",
    )
    add(
        "--minutes",
        type=_minutes,
        metavar="N",
        help="stop at a checkpoint after so many, with status 75; the same command goes on",
    )
    add(
        "--strategy",
        choices=get_args(Strategy),
        default="ddp",
        help="how they share its model (ddp)",
    )
    add(
        "--context-parallel",  # recipes have an option --context, the length of a sequence
        type=positive,
        default=1,
        metavar="N",
        help="of the processes that share each sequence (1): docs/scaling.md",
    )
    add(
        "--on",
        choices=("here", "ray"),
        default="here",
        help="this machine, or the machines of a Ray cluster (here): docs/scaling.md",
    )
    add(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help="show the runs in tensorboard, mlflow or your own file.py:function (repeat): "
        "docs/trackers.md",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what every arm would take on a GPU, in hours and memory, and what the study "
        "can detect; of a script its runs instead of hours; run nothing",
    )
    add("--chip", metavar="NAME", help="that --dry-run is for, e.g. h200 (the study's own)")
    add(
        "--underpowered",
        action="store_true",
        help="start a study that cannot detect what it asks",
    )
    add("--yes", action="store_true", help="start a long study without asking")
    _add_out(parser)
    return parser


def _sub(name: str, description: str, *, stored: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a subcommand; of one that looks at stored studies with their folder."""
    parser = argparse.ArgumentParser(
        prog=f"tilewise study {name}", description=f"{description[:1].upper()}{description[1:]}."
    )
    if stored:
        _add_out(parser)
    return parser


def _no_arguments(name: str, description: str, argv: Sequence[str]) -> None:
    _sub(name, description, stored=False).parse_args(argv)


def _add_out(parser: argparse.ArgumentParser) -> None:
    default = store.studies_folder()
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help=f"of all studies ({default})"
    )
