"""Block-sparse attention: ``tilewise.BlockMask`` knows of each tile whether it is empty or full."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.checks import check_block, check_whole
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.sparse.tables import build, sizes
from tilewise.variants.patterns import layout
from tilewise.variants.program import Instr, Program
from tilewise.variants.values import Mask, as_mask, versions_of

BLOCK = (64, 128)  # the kernels' own tiles: queries x keys
_WIDTH = 64  # characters of a picture
# Of a character's tiles: none visible, few, half or more of them not empty, all of them full.
_EMPTY, _THIN, _THICK, _FULL = "·", "░", "▒", "█"
_EVERYTHING: Program = (Instr("band", (-1, -1, 0)),)


class Counts(NamedTuple):
    """How many tiles there are of each kind, over all batch items and heads of the table."""

    empty: int
    partial: int
    full: int


class BlockMask(Mask):
    """A mask with a table of its tiles: which are empty, which partial, and which full.

    Attention with it visits the tiles that are not empty, and evaluates the mask in partial ones
    only. It gives the same bits as the mask alone. Memory is O(number of tiles). Make one with
    ``of`` from any mask, with ``from_layout`` from a boolean per tile, or with ``from_flex`` from
    FlexAttention's.

    It is a snapshot: the table reflects what the captured tensors held when it was made. A call is
    refused if the BlockMask's tensors were changed in place since. Nothing is ever looked up by a
    tensor's identity.

    ``a & b``, ``a | b`` and ``~a`` give plain masks, which still use the tables of both, and are
    refused as they are. For a mask with its own table, write ``BlockMask.of(a & b, ...)``.
    """

    __slots__ = ()

    def __init__(self, program: Program, captured: tuple[Tensor, ...] = ()) -> None:
        last = program[-1] if program else Instr("")
        if last.op != "tiles" and not (last.op == "blocks" and len(program) == 1):
            raise InvalidArgument("program", repr(program), "one that ends with a table of tiles")
        super().__init__(program, captured)
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "versions", versions_of(captured))

    @classmethod
    def of(
        cls,
        mask: Mask | Tensor | Callable[..., Any] | None,
        queries: int | None = None,
        keys: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        block: tuple[int, int] = BLOCK,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "BlockMask":
        """Return the table of any mask that ``mask=`` takes, for attention of these sizes.

        Intervals prove most tiles empty or full; the others are evaluated. A mask that does not
        depend on the batch item or on the head has one table for all of them.

        Args:
            mask: as in ``attention``, such as a boolean tensor that broadcasts to [B, Hq, M, N].
            queries: M, query rows.
            keys: N; M if None.
            batch: B; needed where the mask depends on the batch item.
            heads: Hq; needed where the mask depends on the head.
            block: queries and keys of a tile. The kernels' own size serves best.
            cu_seqlens_q: [B + 1] of ``attention_varlen``, instead of M and B.
            cu_seqlens_k: [B + 1] of ``attention_varlen``, instead of N.
            dtype: of q, k and v; matters to masks that compute with floats.

        Raises:
            InvalidArgument, InvalidType: naming the argument that is wrong.
            Unsupported: while torch.compile traces; make it outside and pass it in.
        """
        if torch.compiler.is_compiling():
            fix = "make it outside of what is compiled, and pass it in."
            raise Unsupported("BlockMask.of while torch.compile traces", fix=fix)
        plain = Mask(()) if mask is None else as_mask(mask)
        if isinstance(plain, BlockMask):
            plain = plain.to_mask()
        if not plain.program:
            plain = Mask(_EVERYTHING)
        extents = sizes(queries, keys, batch, heads, cu_seqlens_q, cu_seqlens_k, dtype)
        block = check_block(block)
        with torch.no_grad():
            table = build(plain, extents, block)
        slot = len(plain.captured)
        captured = (*plain.captured, table.covers)
        slots: tuple[int, ...] = (slot,)
        if extents.cu_seqlens is not None:
            counts = (extents.query_counts, extents.key_counts)
            captured += tuple([torch.tensor(each, dtype=torch.int64) for each in counts])
            slots = (slot, slot + 1, slot + 2)
        params = (*block, table.batch, table.heads, *extents.longest, table.width)
        return cls((*plain.program, Instr("tiles", params, slots)), captured)

    @classmethod
    def from_layout(cls, tiles: Tensor, block: tuple[int, int] = BLOCK) -> "BlockMask":
        """Return the mask that a boolean per tile spells out: all pairs of a tile attend, or none.

        Args:
            tiles: bool [.., M / block[0], N / block[1]], rounded up; before that Hq, and before
                that B, either of them 1 or left out. It is copied.
            block: queries and keys of a tile.

        Raises:
            InvalidArgument, InvalidType: it is no boolean tensor of two to four dimensions.
        """
        mask = layout(tiles, block)
        return cls(mask.program, mask.captured)

    @classmethod
    def from_flex(
        cls,
        block_mask: Any,
        queries: int | None = None,
        keys: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> "BlockMask":
        """Return the same mask as a ``torch.nn.attention.flex_attention.BlockMask``.

        Its ``mask_mod`` is traced; what its lists of blocks leave out stays left out. The block
        size, M and N are its own; B and Hq too, unless its lists serve all items or heads.

        Args:
            block_mask: FlexAttention's.
            queries: M, of a slice of a block mask (``block_mask[:, :, i]``), which does not know
                it; None for its own, or all rows of the slice's blocks.
            keys: N, of one that ``_adjust`` cropped in torch 2.11, which rounds its lengths up to
                whole blocks; None for its own.
            batch: B, where its lists serve all batch items and ``mask_mod`` tells them apart.
            heads: Hq, where its lists serve all heads and ``mask_mod`` tells them apart.

        Raises:
            InvalidArgument, InvalidType: it is none, or its ``mask_mod`` is not in the language.
        """
        from tilewise.sparse import flex  # imports FlexAttention

        given = flex.read(block_mask, queries, keys)
        keywords: dict[str, Any] = {"block": given.block}
        for name, own, asked in zip(
            ("batch", "heads"), given.covers.shape, (batch, heads), strict=False
        ):
            keywords[name] = own if asked is None or own != 1 else asked
        mask = Mask(_EVERYTHING) if given.mask is None else as_mask(given.mask)
        found = cls.of(mask, given.queries, given.keys, **keywords)
        # Of a mask that captures nothing the table is made on the CPU, wherever the lists are.
        place, known = given.covers.device, given.covers.to(found.covers.device)
        if bool(((known == 1) | (known == found.covers)).all()):
            return found if place == found.covers.device else found.to(place)
        partial, full = (layout(given.covers == cover, given.block) for cover in (1, 2))
        return cls.of((mask & partial) | full, given.queries, given.keys, **keywords)

    def to_flex(self) -> Any:
        """Return the same mask as a ``torch.nn.attention.flex_attention.BlockMask``.

        Raises:
            Unsupported: it is for a variable-length call.
        """
        self.current()
        if len(self._table.slots) == 3:
            raise Unsupported("FlexAttention's BlockMask of a variable-length call")
        queries, keys = self.queries, self.keys
        if queries is None or keys is None:
            rows, columns = self.covers.shape[-2:]
            queries, keys = rows * self.block[0], columns * self.block[1]
        from tilewise.sparse import flex  # imports FlexAttention

        return flex.write(self.to_mask(), self.covers, self.block, queries, keys)

    def to_mask(self) -> Mask:
        """Return the same mask without its table (that of a layout is the layout)."""
        if self._table.op == "blocks":
            return Mask(self.program, self.captured)
        return Mask(self.program[:-1], self.captured[: self._table.slots[0]])

    def to(self, device: torch.device | str) -> "BlockMask":
        """Return the mask with its tensors on a device."""
        captured = self.current().captured
        return BlockMask(self.program, tuple([tensor.to(device) for tensor in captured]))

    @property
    def _table(self) -> Instr:
        return self.program[-1]

    @property
    def covers(self) -> Tensor:
        """The table: uint8 [B|1, Hq|1, ceil(M / q), ceil(N / k)] of 0 (empty), 1, 2 (full)."""
        held = self.captured[self._table.slots[0]]
        return held if self._table.op == "tiles" else held.to(torch.uint8) * 2

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        rows, columns = self._table.params[:2]
        return int(rows), int(columns)

    @property
    def queries(self) -> int | None:
        """M (of the longest sequence); None for a layout, which fits any that it covers."""
        return int(self._table.params[4]) if self._table.op == "tiles" else None

    @property
    def keys(self) -> int | None:
        """N (of the longest sequence); None for a layout, which fits any that it covers."""
        return int(self._table.params[5]) if self._table.op == "tiles" else None

    @property
    def counts(self) -> Counts:
        """Return how many tiles are empty, partial and full."""
        found = torch.bincount(self.covers.flatten().to(torch.int64), minlength=3)
        return Counts(*found.tolist())

    @property
    def density(self) -> float:
        """The share of tiles that are not empty, which is what attention's time goes with."""
        empty, partial, full = self.counts
        return (partial + full) / max(1, empty + partial + full)

    def picture(self, batch: int = 0, head: int = 0, width: int = _WIDTH) -> str:
        """One table in characters: ``·`` empty, ``█`` full, ``▒`` and ``░`` in between.

        Args:
            batch: whose table; any number where one serves all.
            head: whose table; any number where one serves all.
            width: of the picture, at most.

        Raises:
            InvalidArgument, InvalidType: there is no such table.
        """
        check_whole("width", width, 1)
        table = self.covers
        for name, index, size in (("batch", batch, table.shape[0]), ("head", head, table.shape[1])):
            if check_whole(name, index) >= size > 1:
                raise InvalidArgument(name, str(index), f"one of {size}")
        if 0 in table.shape:
            return ""
        chosen = table[min(batch, table.shape[0] - 1), min(head, table.shape[1] - 1)]
        return "\n".join(_drawn(chosen.cpu(), width))

    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return what its table says, as ``tilewise.explain`` shows it."""
        return (("table", self._summary()),)

    def _summary(self) -> str:
        empty, partial, full = self.counts
        batch, heads, rows, columns = self.covers.shape
        apart = f"{batch} x {heads} x " if batch * heads != 1 else ""
        return (
            f"{apart}{rows} x {columns} tiles of {self.block[0]} x {self.block[1]}, "
            f"density {self.density:.3f}: {empty} empty, {partial} partial, {full} full"
        )

    def __repr__(self) -> str:
        return f"BlockMask({self._summary()})"

    def __str__(self) -> str:
        drawn = self.picture()
        return f"{self!r}\n{drawn}" if drawn else repr(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self.text == other.text and all(
            a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
            for a, b in zip(self.captured, other.captured, strict=True)
        )

    def __hash__(self) -> int:
        return hash((self.text, self.covers.shape))

    def __iter__(self) -> NoReturn:
        raise InvalidType("BlockMask", "an iteration over it", "its covers, counts or picture()")


def _drawn(covers: Tensor, width: int) -> list[str]:
    """The lines of a picture of one table [rows, columns], at most ``width`` characters wide.

    A character stands for one tile, or for a square of them where there are more: ``·`` all empty,
    ``█`` all full, ``▒`` at least half of them not empty, ``░`` fewer.
    """
    rows, columns = covers.shape
    across = -(-columns // width)
    # Characters are about twice as high as wide.
    along = max(1, -(-rows // max(1, width // 2)))
    lines = []
    for top in range(0, rows, along):
        band = covers[top : top + along]
        cells = [band[:, left : left + across] for left in range(0, columns, across)]
        lines.append("".join([_cell(cell) for cell in cells]))
    return lines


def _cell(tiles: Tensor) -> str:
    seen = int(torch.count_nonzero(tiles))
    if seen == 0:
        return _EMPTY
    if bool((tiles == 2).all()):
        return _FULL
    return _THICK if 2 * seen >= tiles.numel() else _THIN
