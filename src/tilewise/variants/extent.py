"""The form for captured tensors: the sizes of a call, and the dtype of its statistics."""

from typing import NamedTuple

import torch


class Extent(NamedTuple):
    """What captured tensors are broadcast against.

    Args:
        batch, heads: B (sequences in a variable-length call) and Hq.
        queries, keys: M and N; the longest sequence's in a variable-length call, and 0 where that
            is not known yet (while tracing).
        ragged: a variable-length call: captured dimensions may then be longer than needed.
        key_counts, query_counts: the keys and queries of each sequence, where lengths are checked
            one by one.
        check_values: whether values may be read (false for fake and device tensors).
    """

    batch: int
    heads: int
    queries: int
    keys: int
    ragged: bool = False
    key_counts: tuple[int, ...] = ()
    query_counts: tuple[int, ...] = ()
    check_values: bool = True

    @classmethod
    def of_sequences(
        cls, heads: int, query_counts: tuple[int, ...], key_counts: tuple[int, ...]
    ) -> "Extent":
        """Return the extent of a variable-length call with so many queries and keys in each."""
        return cls(
            len(query_counts),
            heads,
            max(query_counts, default=0),
            max(key_counts, default=0),
            ragged=True,
            key_counts=key_counts,
            query_counts=query_counts,
        )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, slopes and sinks: float32, and float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
