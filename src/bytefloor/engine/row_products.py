"""How products of many rows of activations are cut: kernels, tiles and parts of K, decided without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.kernels import KernelSpec, spec
from bytefloor.engine.launches import ACTIVATIONS, RESERVED_BYTES, Card
from bytefloor.errors import UnsupportedError
from bytefloor.formats.lanes import ROWS, STEP, StreamForm

MOST_SPLITS = 8
MOST_TILES, MOST_RECORDS = 5, 8
"""Slots of the two rings."""
WIDE_COLUMNS = 256
"""Of the longest records. Compiled for shorter ones, a tile of 128 rows with four warpgroups spills."""
LEAST_STEPS = 4
"""Of 64 columns, whose records are under way."""
FEW_ROWS, TILES_OF_FEW = 64, WIDE_COLUMNS // STEP
"""Up to so many rows, whose products wait for unpacking, weights are multiples of a unit where a form has one, and the
ring of tiles has a slot for each step of a long record: the kernel need not count which is whose."""
_STEPS_AN_ITEM = 6
_BYTES_A_STEP = 16384
"""What a block writes to memory and reads back while it multiplies 64 columns."""
ALIGNMENT_BYTES = 1024
"""Tiles of x begin on these: what a block may lose of its shared memory."""
BARRIER_BYTES = 16
"""Of each slot of a ring: one for full, one for empty."""


@dataclass(frozen=True)
class RowTile:
    """A block's shape. n_rows: of x. warpgroups: with 64 rows of W each. blocks: of a multiprocessor. cluster: blocks
    that share tiles of x, where chips have clusters.

    registers, left_registers: of a lane that multiplies and of one that does not, where warpgroups can choose: all
    together what the block was launched with.
    """

    n_rows: int
    warpgroups: int
    blocks: int
    registers: int
    left_registers: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def weight_rows(self) -> int:
        return 64 * self.warpgroups


TILES = (
    RowTile(32, 2, 2, 104, 24),
    RowTile(64, 2, 2, 104, 24),
    RowTile(128, 4, 1, 112, 32),
    RowTile(256, 2, 1, 232, 40, 2),
)
"""Few rows leave the tensor cores waiting for the weights' unpacking, which more warps do faster; many need
registers."""

FEWER_WARPS = RowTile(128, 2, 1, 232, 40)
"""In place of the one of as many rows for several matrices, and for records of less than 256 columns: four warpgroups
have no registers for them."""


def pad_rows(n: int) -> int:
    """Rows that a chunk of n has room for: one of a few numbers, so that its launches are planned once for each."""
    for tile in TILES:
        if n <= tile.n_rows:
            return tile.n_rows
    return ceil_div(n, TILES[-1].n_rows) * TILES[-1].n_rows


def row_paddings(n: int) -> tuple[int, ...]:
    """All that ``pad_rows`` gives for up to n rows."""
    return tuple(
        sorted({pad_rows(i) for i in (*(tile.n_rows for tile in TILES), *range(1, n + 1)) if i <= pad_rows(n)})
    )


@dataclass(frozen=True)
class RowProduct:
    """Matrices side by side that multiply the same rows. sizes: rows of each. k: their columns.

    activation: where they are one matrix of gates and ups by turns, of which outputs are made.
    """

    forms: tuple[StreamForm, ...]
    sizes: tuple[int, ...]
    k: int
    activation: str | None = None

    def tile(self, pitch: int) -> RowTile:
        """For a padded number of rows."""
        tile = next(tile for tile in TILES if tile.n_rows == min(pitch, TILES[-1].n_rows))
        is_much = len(self.forms) > 1 or any(form.columns < WIDE_COLUMNS for form in self.forms)
        return FEWER_WARPS if is_much and tile.n_rows == FEWER_WARPS.n_rows else tile

    def kernel(self, pitch: int, card: Card) -> KernelSpec:
        """UnsupportedError where two slots of weights do not fit in shared memory beside two tiles."""
        tile = self.tile(pitch)
        slot = max(form.n_bytes(ROWS, form.columns) for form in self.forms) * 4 * tile.warpgroups
        tile_bytes = tile.n_rows * STEP * 2
        # Outputs of gates leave by way of shared memory.
        staged = tile.weight_rows // 128 * tile_bytes if self.activation else 0
        room = card.multiprocessor_bytes // tile.blocks - RESERVED_BYTES - ALIGNMENT_BYTES - staged

        is_few = tile.n_rows <= FEW_ROWS
        most_tiles = TILES_OF_FEW if is_few else MOST_TILES

        def tiles_beside(slots_w: int) -> int:
            return min(most_tiles, (room - slots_w * (slot + BARRIER_BYTES)) // (tile_bytes + BARRIER_BYTES))

        # Records of one step must last as long as tiles do, where there is room for that.
        wanted = max(2, LEAST_STEPS // (min(form.columns for form in self.forms) // STEP))
        slots_x = max(tiles_beside(wanted), min(2, tiles_beside(2)))
        slots_w = min(MOST_RECORDS, (room - slots_x * (tile_bytes + BARRIER_BYTES)) // (slot + BARRIER_BYTES))
        if slots_x < 2:
            raise UnsupportedError(
                f"{self.forms[0].name}: no room for two slots of {slot} bytes beside tiles of {tile.n_rows} rows"
            )
        return spec(
            "product_rows",
            tile.threads,
            ALIGNMENT_BYTES + staged + slots_x * tile_bytes + slots_w * slot + (slots_x + slots_w) * BARRIER_BYTES,
            SEGMENTS=" ".join(f"S({bits}, {name})" for name, bits in self._bits().items()),
            TILE=tile.n_rows,
            GROUPS=tile.warpgroups,
            BLOCKS=tile.blocks,
            CLUSTER=tile.cluster,
            FEW=is_few,
            REGISTERS=tile.registers,
            LEFT_REGISTERS=tile.left_registers,
            SLOTS_W=slots_w,
            SLOTS_X=slots_x,
            SLOT_BYTES=slot,
            GLU=ACTIVATIONS[self.activation],
        )

    def _bits(self) -> dict[str, int]:
        """Which of the matrices have each form, a bit for each: one that several have is compiled once."""
        bits: dict[str, int] = {}
        for i, form in enumerate(self.forms):
            bits[form.name] = bits.get(form.name, 0) | 1 << i
        return bits

    def n_items(self, pitch: int) -> int:
        """Blocks' items where K is whole: clusters are whole too."""
        tile = self.tile(pitch)
        clusters = sum(ceil_div(n, tile.weight_rows * tile.cluster) for n in self.sizes)
        return clusters * tile.cluster * ceil_div(pitch, tile.n_rows)

    def splits(self, pitch: int, card: Card) -> int:
        """Parts that K is cut in: as many as let the card's blocks end together, less what summing the parts costs.

        In steps of 64 columns of one item: a part costs its steps and some to begin and to end; a plane more is written
        and read again.
        """
        tile, steps = self.tile(pitch), ceil_div(self.k, STEP)
        if steps % 4 or self.activation:
            return 1
        units, items, blocks = steps // 4, self.n_items(pitch), card.n_multiprocessors * tile.blocks
        plane_steps = sum(self.sizes) * pitch * 8 / (blocks * _BYTES_A_STEP)

        def cost(splits: int) -> float:
            rounds = ceil_div(items * splits, blocks)
            return rounds * (4 * ceil_div(units, splits) + _STEPS_AN_ITEM) + splits * plane_steps

        return min(range(1, min(MOST_SPLITS, units) + 1), key=cost)

    def n_blocks(self, splits: int, pitch: int, card: Card) -> int:
        """Blocks of a launch: one for each item, or as many as the card has at once."""
        tile = self.tile(pitch)
        most = card.n_multiprocessors * tile.blocks // tile.cluster * tile.cluster
        return min(self.n_items(pitch) * splits, most)
