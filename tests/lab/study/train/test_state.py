"""Checkpoints: every bit comes back, and nothing but a whole one of this run is believed."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tilelab.common.files import DiskFullError
from tilelab.study.train.state import (
    CheckpointError,
    State,
    pack,
    read,
    state_sha256,
    unpack,
    weights_sha256,
    write,
)

IDENTITY = {"config": "abc", "seed": "3", "corpus": "f00"}
NESTED: dict[str, Any] = {
    "state": {0: {"step": torch.tensor(3.0), "m": torch.arange(6.0).view(2, 3)}, 7: {}},
    "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "params": [0, 7], "fused": None}],
    "odd": [math.inf, -0.0, 5e-324, True, "text", (1, [2, (3,)])],
}


def _state(tensors: dict[str, Tensor] | None = None) -> State:
    found = {"w": torch.arange(4.0), "n": torch.tensor(2)} if tensors is None else tensors
    return State(IDENTITY, 5, found, {"scaler": {"dict": []}}, {"train_wall_s": 1.5})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        together = zip(one, other, strict=True)
        return type(one) is type(other) and all(_same(a, b) for a, b in together)
    return type(one) is type(other) and repr(one) == repr(other)


def test_nested_values_survive_json_with_types_and_bits() -> None:
    tensors: dict[str, Tensor] = {}
    packed = json.loads(json.dumps(pack(NESTED, "optimizer", tensors)))
    assert set(tensors) == {"optimizer.state.0.step", "optimizer.state.0.m"}
    found = unpack(packed, tensors)
    assert _same(found, NESTED)
    assert found["state"][0]["m"].data_ptr() != NESTED["state"][0]["m"].data_ptr()
    with pytest.raises(TypeError, match=r"optimizer\.a\.1: a set"):
        pack({"a": [1, {2}]}, "optimizer", {})


WIDE = ("float64", "float32", "int64", "int32")
NARROW = ("float16", "bfloat16", "int16", "int8", "uint8", "bool")


@pytest.mark.parametrize("name", [*WIDE, *NARROW])
def test_every_dtype_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2, (3, 5), generator=generator) * 3 - 1
    tensors = {
        "matrix": wide.to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "strided": wide.to(dtype).t(),
        "odd": torch.ones(3, dtype=torch.uint8),  # what follows it must still be aligned
    }
    write(_state(tensors), tmp_path / "c")
    found = read(tmp_path / "c", IDENTITY)
    assert found is not None
    assert _same(found.tensors, {name: each.contiguous() for name, each in tensors.items()})
    assert _same(load_file(tmp_path / "c"), found.tensors), "not a file of safetensors"


def test_a_state_comes_back_whole_and_is_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    (tmp_path / "c.new").write_bytes(b"torn" * 10_000)  # what a killed process left
    odd = torch.tensor([0x7FC12345, -(2**31), 1], dtype=torch.int32).view(torch.float32)
    state = _state({"w": odd})
    write(state, tmp_path / "c")
    found = read(tmp_path / "c", IDENTITY)
    assert found is not None
    assert (found.identity, found.step, found.values, found.totals) == (
        state.identity,
        state.step,
        state.values,
        state.totals,
    )
    assert found.sha256 == state.sha256
    assert torch.equal(found.tensors["w"].view(torch.int32), odd.view(torch.int32))
    assert os.listdir(tmp_path) == ["c"]
    assert read(tmp_path / "other", IDENTITY) is None


@pytest.mark.parametrize("key", ["config", "seed", "corpus"])
def test_a_checkpoint_of_another_run_is_refused(key: str, tmp_path: Path) -> None:
    write(_state(), tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"a checkpoint of another {key} .*not other"):
        read(tmp_path / "c", {**IDENTITY, key: "other"})


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text"])
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(_state(), path)
    whole = bytearray(path.read_bytes())
    match damage:
        case "flip":
            whole[-3] ^= 1
        case "cut":
            del whole[-3:]
        case "empty":
            whole.clear()
        case _:
            whole[:] = b"not a checkpoint at all, but some text that somebody put here"
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"is damaged .* remove"):
        read(path, IDENTITY)


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    write(_state(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFullError, match=r"no room to write \S+ \(No space left"):
        write(_state({"w": torch.ones(1000)}), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


def test_hashes_depend_on_names_shapes_dtypes_bits_and_values() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    seen = [
        state_sha256(base, {"x": 1}),
        state_sha256({**base, "b": torch.ones(2, dtype=torch.float64)}, {"x": 1}),
        state_sha256({**base, "a": torch.zeros(3, 2)}, {"x": 1}),
        state_sha256({**base, "a": -torch.zeros(2, 3)}, {"x": 1}),
        state_sha256({"a": base["a"], "c": base["b"]}, {"x": 1}),
        state_sha256(base, {"x": 2}),
    ]
    assert len(set(seen)) == len(seen)
    assert state_sha256(dict(reversed(base.items())), {"x": 1}) == seen[0]
    model, same = nn.Linear(2, 2), nn.Linear(2, 2)
    assert weights_sha256(model) != weights_sha256(same)
    same.load_state_dict(model.state_dict())
    assert weights_sha256(model) == weights_sha256(same)
    one, other = _state(), _state()
    other.totals = {"train_wall_s": 99.0}
    assert one.sha256 == other.sha256, "counts are no part of it"
    other.step += 1
    assert one.sha256 != other.sha256
