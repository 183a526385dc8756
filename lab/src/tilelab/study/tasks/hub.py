"""Data sets of the Hugging Face Hub, through the package datasets."""

from __future__ import annotations

from typing import Any

from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["HUB", "table"]

HUB = "hub:"  # of a ``data.source``


def table(source: str, configuration: str | None, split: str | None, files: str) -> Any:
    """A split of a data set, by a name of the Hub or the path of a folder that is laid out so.

    Args:
        source: ``data.source``, with ``hub:``.
        configuration: of the data set; None for its only one.
        split: of it; None for all of them, by name.
        files: what ``data.source`` may be instead, in words.

    Raises:
        InvalidArgument: it is not there.
        Unsupported: the package datasets is not.
    """
    try:
        import datasets
    except ImportError:
        fix = f"pip install 'tilewise[hub]', or set data.source to {files}"
        raise Unsupported("a data set of the Hub without the package datasets", fix=fix) from None
    try:
        return datasets.load_dataset(source.removeprefix(HUB), configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        came = f"{source} ({' '.join(str(error).split())[:200]})"
        of = "" if configuration is None else f"the configuration {configuration} and "
        of += "a split" if split is None else f"the split {split}"
        raise InvalidArgument("data.source", came, f"a data set with {of}") from None
