"""The registry: what a function says about itself is what a config may set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import Field

from tests.blocks import block_of, executes
from tests.conftest import ran
from tilelab.study.ask import values as registry
from tilelab.study.ask.run_config import Schedule
from tilelab.study.ask.values import Kind, Share, find, names, nearest, register, resolve
from tilelab.study.choices import schedules
from tilelab.study.choices.schedules import factor
from tilewise.errors import InvalidArgument


@pytest.fixture
def made_up() -> Iterator[str]:
    """A choice of a test, gone after it."""
    names("variant")  # imports the package's own first
    before = dict(registry._ENTRIES)

    def fits(*, low: float, high: float, **_: object) -> None:
        if low > high:
            raise InvalidArgument("variant.low", str(low), f"at most high={high}")

    @register("variant", check=fits)
    def made_up(
        heads: int,
        *,
        low: Share = 0.25,
        high: float = 2.0,
        count: Annotated[int, Field(ge=1)] = 3,
        flag: bool = False,
        shape: Literal["round", "square"] = "round",
        pair: tuple[Share, Share] = (0.5, 0.75),
    ) -> None:
        """What it does.

        And more.
        """

    yield "made-up"
    registry._ENTRIES.clear()
    registry._ENTRIES.update(before)


@executes("CONTRIBUTING.md", 1)
def test_the_schedule_of_the_page(made_up: str) -> None:
    """CONTRIBUTING.md's: a choice like those that there are. The fixture removes it again."""
    code = block_of("CONTRIBUTING.md", 1).code
    exec(code, dict(vars(schedules)))
    made = Schedule(name="parabola", floor=0.2, warmup=0.0)
    assert [factor(made, step, 4) for step in range(4)] == pytest.approx([1.0, 0.65, 0.4, 0.25])
    warm = Schedule(name="parabola", floor=0.2, warmup=0.5)
    assert [factor(warm, step, 4) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.4])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_choice_says_what_it_does(kind: Kind) -> None:
    assert len(names(kind)) > 1
    for name in names(kind):
        entry = find(kind, name)
        assert entry.summary.endswith("."), name
        assert 10 < len(entry.summary) <= 100, name
        assert resolve(kind, name, {}) == dict(entry.defaults)


def test_a_function_is_registered_under_its_name_with_its_keywords(made_up: str) -> None:
    entry = find("variant", made_up)
    assert (entry.kind, entry.name, entry.summary) == ("variant", "made-up", "What it does.")
    assert dict(entry.defaults) == {
        "low": 0.25,
        "high": 2.0,
        "count": 3,
        "flag": False,
        "shape": "round",
        "pair": (0.5, 0.75),
    }
    assert made_up in names("variant")
    with pytest.raises(InvalidArgument, match=r"variant\.low: got 0\.5; required: at most high"):
        resolve("variant", made_up, {"low": 0.5, "high": 0.1})


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("high", 3, 3.0),  # a whole number stands for a float
        ("count", 4, 4),
        ("flag", True, True),
        ("shape", "square", "square"),
        ("pair", [0, 0.5], (0.0, 0.5)),  # a list of JSON
    ],
)
def test_values_are_kept_in_the_type_of_the_option(
    made_up: str, key: str, given: Any, kept: Any
) -> None:
    value = resolve("variant", made_up, {key: given})[key]
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("key", "given", "required"),
    [
        ("low", 1.0, "less than 1"),
        ("low", -0.1, "greater than or equal to 0"),
        ("high", "3", "a valid number"),
        ("high", True, "a valid number"),
        ("high", float("nan"), "a finite number"),
        ("high", float("inf"), "a finite number"),
        ("high", None, "a valid number"),
        ("count", 2.0, "a valid integer"),
        ("count", True, "a valid integer"),
        ("count", 0, "greater than or equal to 1"),
        ("flag", 1, "a valid boolean"),
        ("shape", "oval", "'round' or 'square'"),
        ("pair", [0.5], "2 values, as in (0.5, 0.75)"),
        ("pair", [0.5, 0.5, 0.5], "2 values"),
        ("pair", [0.5, 2], "less than 1"),
        ("pair", 0.5, "a valid tuple"),
    ],
)
def test_other_values_are_refused_by_name(
    made_up: str, key: str, given: Any, required: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        resolve("variant", made_up, {key: given})
    assert error.value.argument.partition("[")[0] == f"variant.{key}"
    assert required in error.value.required


def test_an_unknown_option_suggests_the_nearest(made_up: str) -> None:
    with pytest.raises(InvalidArgument, match=r"variant\.cuont.*Did you mean 'count'\?"):
        resolve("variant", made_up, {"cuont": 1})
    assert nearest("zzz", ["lr", "betas"]) == ""
    with pytest.raises(InvalidArgument, match="none: it has no options"):
        resolve("variant", "causal", {"size": 3})


@pytest.mark.parametrize("name", ["adam-w", 3, None, ["adamw"]])
def test_an_unknown_name_says_which_there_are(name: Any) -> None:
    with pytest.raises(InvalidArgument) as error:
        find("optimizer", name)
    assert ", ".join(names("optimizer")) in str(error.value)
    assert ("Did you mean 'adamw'?" in str(error.value)) == (name == "adam-w")


def test_a_choice_without_docstring_or_standard_value_is_refused() -> None:
    before = names("schedule")
    with pytest.raises(AssertionError, match="docstring"):

        @register("schedule")
        def silent(progress: object, *, warmup: float = 0.0) -> None: ...

    with pytest.raises(AssertionError, match="give size"):

        @register("schedule")
        def unset(progress: object, *, size: int) -> None:
            """Something."""

    with pytest.raises(InvalidArgument, match="warmup"):

        @register("schedule")
        def outside(progress: object, *, warmup: Share = 1.5) -> None:
            """Something."""

    assert names("schedule") == before


def test_the_registry_fills_itself_in_a_fresh_process() -> None:
    """Nobody has to import the choices: neither a config nor a list of names needs it."""
    program = (
        "from tilelab.study.ask.values import names; print(names('variant'));"
        "from tilelab.study.ask.config import RunConfig; print(RunConfig().schedule.options)"
    )
    done = ran(sys.executable, "-W", "error", "-c", program)
    assert done.stdout == f"{names('variant')}\n{{'warmup': 0.05, 'warmup_steps': 0}}\n"
