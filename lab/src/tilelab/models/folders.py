"""A model's folder in the Hugging Face layout: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilewise.errors import InvalidArgument

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write the two files, each whole or not at all; files of an earlier save are replaced.

    Args:
        folder: made where it is missing.
        tensors: by their names in the file.
        values: of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / f".{WEIGHTS}.new", folder / f".{CONFIG}.new"
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    text = json.dumps(dict(values), indent=2, sort_keys=True) + "\n"
    config.write_text(text, encoding="utf-8")
    os.replace(weights, folder / WEIGHTS)
    os.replace(config, folder / CONFIG)


def read_config(folder: Path, kinds: Collection[str]) -> dict[str, Any]:
    """Read ``config.json`` of a folder.

    Args:
        folder: of the files.
        kinds: the model types that will do, the best known one first.

    Raises:
        InvalidArgument: it is not there, or of another model.
    """
    required = f"a folder with {CONFIG} and {WEIGHTS}"
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("folder", f"{folder} ({error.strerror})", required) from None
    except ValueError as error:
        came = f"{folder / CONFIG}, which is not JSON ({error})"
        raise InvalidArgument("folder", came, required) from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in kinds:
        wanted = f"type {next(iter(kinds))!r}"
        raise InvalidArgument("folder", f"{folder}, a model of type {kind!r}", wanted)
    assert isinstance(values, dict)
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file; those of half precision are widened to float32.

    Raises:
        InvalidArgument: no such file, or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidArgument("folder", f"{path} ({error})", "a file of safetensors") from None
    return {
        name: each if each.dtype == torch.float64 else each.float() for name, each in found.items()
    }
