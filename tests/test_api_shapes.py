"""The reference names the shapes of tensors: docs/api.md promises them for every public name.

Every public function, method, property and class that takes or returns tensors

1. names a shape in its docstring, as in ``[B, Hq, M, D]``;
2. says of each tensor under ``Args`` which shape it has, or which other one has the same: a shape,
   "of one element", "shaped as q", "as in ``attention``", "likewise";
3. says the same of the tensors that it returns, outside of ``Args``;
4. mentions a tensor that has no entry under ``Args`` in a sentence with a shape, or names the
   function or the module that explains the arguments.

Tensors are found by annotations; a tuple or dataclass has them as its fields. Only names that the
site shows count: a class answers for its ``__init__`` and ``__call__``, and names that belong to
another library answer for themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from tests.test_site import ABSENT, module, modules, public_names

# What the rules find and nothing has to be done about, and why.
EXCEPTIONS = {
    "tilewise.BlockMask: no shape": "made by methods, which have the shapes of what they take",
    "tilewise.masks.Mask: no shape": "made by functions, which have the shapes of what they take",
    "tilewise.scores.Score: no shape": "likewise",
    "tilewise.variants.float8.refuse_gradients: no shape": "tensors of any shape",
    "tilewise.variants.float8.refuse_gradients: tensors": "likewise",
}

OURS = ("tilewise", "tilelab")
SHAPE = re.compile(r"(?<![\w\])])\[((?:[^\[\]]|\w\[\d\])+)\](?!\()")
REFERENCE = r"likewise|\bthe same (?:way|shape)|\bas there\b|\bthis module\b|\bshaped? (?:as|of) |"


class Documented(NamedTuple):
    """A name of the reference.

    Args:
        name: as users write it.
        docstring: what the site shows.
        tensors: the arguments and fields that are tensors.
        returns: whether it returns tensors.
        module: whether it is a torch.nn.Module, whose ``forward`` takes tensors.
    """

    name: str
    docstring: str
    tensors: tuple[str, ...]
    returns: bool
    module: bool


def has_tensor(annotation: Any) -> bool:
    """Return whether a value of this annotation is, or contains, a tensor."""
    text = annotation if isinstance(annotation, str) else str(annotation)
    return bool(re.search(r"\bTensor\b", re.sub(r"Callable\[\[.*?\], [^\]]*\]", "", text)))


def documented(name: str, of: Any, annotations: Mapping[str, Any]) -> Documented:
    """Return a name with its docstring and its tensors."""
    found = [each for each, kind in annotations.items() if has_tensor(kind)]
    tensors = tuple(each for each in found if each != "return")
    is_module = inspect.isclass(of) and issubclass(of, torch.nn.Module)
    return Documented(name, inspect.getdoc(of) or "", tensors, "return" in found, is_module)


def function_of(of: Any) -> Any:
    """Return the function of a method, a property or a decorated function; None of others."""
    of = of.fget if isinstance(of, property) else getattr(of, "__func__", of)
    of = inspect.unwrap(of) if callable(of) else of
    return of if inspect.isfunction(of) else None


def names_of_class(name: str, of: type) -> Iterator[Documented]:
    """Yield a class and what is in it."""
    annotations = inspect.get_annotations(of)
    for special in ("__init__", "__call__"):
        made = vars(of).get(special)
        if inspect.isfunction(made) and not hasattr(made, "__wrapped__"):
            annotations |= inspect.get_annotations(made)  # __init__ returns None, no tensor
    fields = {field: kind for field, kind in annotations.items() if not field.startswith("_")}
    yield documented(name, of, fields)
    for member, value in vars(of).items():
        function = function_of(value)
        if function is not None and not member.startswith("_"):
            shown = value if isinstance(value, property) else getattr(of, member)
            yield documented(f"{name}.{member}", shown, inspect.get_annotations(function))


def names_of(page: str) -> Iterator[Documented]:
    """Yield the public names of a module of the reference that are its library's own."""
    shown = module(page)
    own = [n for n, of in vars(shown).items() if getattr(of, "__module__", 0) == shown.__name__]
    for name in public_names(page) or [each for each in own if not each.startswith("_")]:
        of, full = getattr(shown, name), f"{page}.{name}"
        if inspect.isclass(of) and of.__module__.startswith(OURS):
            yield from names_of_class(full, of)
        elif (function := function_of(of)) is not None and function.__module__.startswith(OURS):
            yield documented(full, of, inspect.get_annotations(function))
        elif not inspect.isclass(of) and function is None and "Tensor" in str(of):
            yield Documented(full, "", (), True, False)  # an alias, of which the site shows no word


def entries_of(docstring: str) -> tuple[dict[str, str], str]:
    """Return what ``Args`` says of each argument, and the rest of a docstring."""
    parts = re.split(r"^(?:Args|Attributes):\n((?:[ \t]+.*\n?|\n)+)", docstring, flags=re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in "\n".join(parts[1::2]).splitlines():
        if entry := re.match(r"    ([\w*][\w*, ]*):(.*)", line):
            names = [name.strip(" *") for name in entry[1].split(",")]
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found, "\n".join(parts[::2])


def names_shape(text: str) -> bool:
    """Return whether a text names a shape: dimensions in brackets, no interval and no number."""
    return any(
        re.search(r"[^\W\d_]|\.\.", dims) and not re.match(r"-|0\b", dims)
        for dims in SHAPE.findall(text)
    )


def refers(text: str, names: tuple[str, ...]) -> bool:
    """Return whether a text says where the shape is: at one of the names, or of another name."""
    own = "|".join(names)
    other = rf"``(?!(?:{own}|None|True|False)``)\w[\w.]*(?:\(\))?``|\bas (?:``)?(?:{own})\b"
    return bool(re.search(REFERENCE + other, text))


def findings(of: Documented) -> Iterator[str]:
    """Yield what a docstring leaves out."""
    if not (of.tensors or of.returns or of.module):
        return
    entries, rest = entries_of(of.docstring)
    names = (*of.tensors, "lse")  # which many return
    if not names_shape(of.docstring):
        yield f"{of.name}: no shape"
    every = re.search(r"\beach \[", rest) is not None
    for tensor in of.tensors:
        if tensor in entries:
            text = entries[tensor]
            one = "of one element" in text
            known = every or one or names_shape(text) or refers(text, names)
        else:
            said = [
                each for each in re.split(r"[.:;]\s", rest) if re.search(rf"\b{tensor}\b", each)
            ]
            known = refers(rest, names) or any(map(names_shape, said))
        if not known:
            yield f"{of.name}: {tensor}"
    if of.returns:
        section = rest.partition("Returns:\n")[2].partition("Raises:\n")[0]
        named = re.search(rf"\b({'|'.join(names)})\b", section)
        if not (named or names_shape(rest) or refers(rest, names)):
            yield f"{of.name}: what it returns"


def reference() -> list[Documented]:
    """Every name of the reference that can be imported here, once for each page it is on."""
    return [x for name in modules() if name not in ABSENT for x in names_of(name)]


def test_the_reference_names_the_shapes_of_tensors() -> None:
    names = reference()
    assert sum(bool(each.tensors or each.returns) for each in names) > 120
    found = {finding for each in names for finding in findings(each)}
    assert sorted(found - EXCEPTIONS.keys()) == []
    assert sorted(EXCEPTIONS.keys() - found) == [], "exceptions that nothing needs any more"


GOOD = """Attend.

Args:
    q: [B, Hq, M, D].
    k, v: [B, Hk, N, D], whose
        heads are shared.
    lengths: int32 [B].

Returns:
    [B, Hq, M, D].
"""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: int | torch.Tensor) -> Any:
    raise NotImplementedError


attend.__doc__ = GOOD


def found_in(docstring: str) -> list[str]:
    """Return what another docstring of ``attend`` leaves out."""
    annotations = {**attend.__annotations__, "return": "Tensor | None"}
    of = documented("attend", attend, annotations)._replace(docstring=docstring)
    return [finding.removeprefix("attend: ") for finding in findings(of)]


@pytest.mark.parametrize(
    ("was", "now", "missing"),
    [
        ("", "", []),
        ("q: [B, Hq, M, D]", "q: the queries", ["q"]),
        ("k, v: [B, Hk, N, D], whose\n        heads are", "k, v: heads are", ["k", "v"]),
        ("k, v: [B, Hk, N, D]", "k, v: as q", []),
        ("int32 [B]", "in [0, M]", ["lengths"]),
        ("int32 [B]", "numbers [1]", ["lengths"]),
        ("int32 [B]", "dict[str, B]", ["lengths"]),
        ("int32 [B]", "int64 of one element", []),
        ("    lengths: int32 [B].\n", "", ["lengths"]),
        ("Attend.", "Attend as ``attention`` does.", []),
        ("Returns:\n    [B, Hq, M, D].", "Returns:\n    A tensor.", ["what it returns"]),
        ("Returns:\n    [B, Hq, M, D].", "Returns:\n    A tensor shaped as q.", []),
    ],
)
def test_a_shape_that_is_missing_is_found(was: str, now: str, missing: list[str]) -> None:
    assert was in GOOD
    assert found_in(GOOD.replace(was, now, 1) if was else GOOD) == missing


def test_a_docstring_without_any_shape_is_found() -> None:
    assert found_in("As ``attention``.") == ["no shape"]
    assert found_in("Attend.") == ["no shape", "q", "k", "v", "lengths", "what it returns"]


def test_the_walk_finds_tensors_wherever_the_site_shows_them() -> None:
    class Pair(NamedTuple):
        """Two."""

        first: torch.Tensor
        number: int

        @property
        def second(self) -> torch.Tensor:
            """Two."""
            return self.first

        @classmethod
        def of(cls, tensor: torch.Tensor) -> Any:
            """Two."""
            return cls(tensor, 1)

    found = {each.name: each for each in names_of_class("Pair", Pair)}
    assert found["Pair"].tensors == ("first",)
    assert found["Pair.second"].returns
    assert found["Pair.of"].tensors == ("tensor",)
