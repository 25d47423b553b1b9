"""Triton's ops that derive a step's indices against torch's, to the integer; what they allocate is filled with junk."""

from dataclasses import dataclass

import pytest
import torch
from against_torch import both
from interpreted import DEVICE, gpu_only, outside, run_interpreted, runs

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.registry import resolve_from


@dataclass(frozen=True)
class Step:
    """Requests of a step: how many tokens each has before it and in it; tokens of padding; requests that are padding too."""

    before: tuple[int, ...]
    lengths: tuple[int, ...]
    padding: int = 0
    idle: int = 0

    @property
    def requests(self):
        return len(self.lengths) + self.idle

    @property
    def tokens(self):
        return sum(self.lengths) + self.padding

    def on_device(self, values):
        return torch.tensor(values, device=DEVICE)

    @property
    def query_start_loc(self):
        ends = [0]
        for n in (*self.lengths, *[0] * self.idle):
            ends.append(ends[-1] + n)
        return self.on_device(ends).int()

    @property
    def seq_lens(self):
        both_ = zip(self.before, self.lengths, strict=True)
        return self.on_device([b + n for b, n in both_] + [0] * self.idle).int()

    @property
    def positions(self):
        spans = zip(self.before, self.lengths, strict=True)
        found = [p for b, n in spans for p in range(b, b + n)]
        return self.on_device(found + [3] * self.padding)

    @property
    def request(self):
        return resolve_from("torch", "request_of_token")(
            self.query_start_loc, self.tokens
        )

    def table(self, blocks, seed=0):
        """Shuffled blocks, in a tensor that is wider."""
        g = torch.Generator().manual_seed(seed)
        wide = torch.randperm(self.requests * (blocks + 3), generator=g) + 1
        wide = wide.view(self.requests, -1).int().to(DEVICE)
        return wide[:, :blocks]

    def tiles(self, size):
        """Request, start and last of tiles of `size`."""
        count = self.tokens // size + self.requests
        cut = resolve_from("torch", "tiles")
        owner, _, start, last, _ = cut(
            self.query_start_loc, self.request, self.positions, size, count
        )
        return owner, start, last


STEPS = [
    Step((0,), (1,)),
    Step((0, 63, 9, 200), (1, 1, 1, 1)),
    Step((30, 0, 127), (6, 6, 6), padding=6, idle=1),
    Step((100, 3, 8, 0), (3, 0, 5, 70), padding=2),
    Step((5,), (150,)),
    pytest.param(Step(tuple(range(0, 7000, 70)), (5,) * 100, 12, 28), marks=gpu_only),
    pytest.param(Step((0, 4096), (5000, 3192)), marks=gpu_only),
]
EVERY_STEP = pytest.mark.parametrize("step", STEPS, ids=str)


@pytest.fixture(autouse=True)
def junk_in_new_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def same(op, *arguments):
    """What Triton gives, which is what torch does."""
    got, want = (function(*arguments) for function in both(op))
    single = isinstance(want, torch.Tensor)
    pairs = [(got, want)] if single else zip(got, want, strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        if one.is_complex():
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
        else:
            assert torch.equal(one, other)
    return got


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter():
    run_interpreted(__file__)


@runs
@EVERY_STEP
def test_request_of_token(step):
    owner = same("request_of_token", step.query_start_loc, step.tokens)
    assert owner.tolist()[: sum(step.lengths)] == [
        r for r, n in enumerate(step.lengths) for _ in range(n)
    ]


@runs
@EVERY_STEP
@pytest.mark.parametrize("size", [2, 6, 128])
def test_tiles(step, size):
    arguments = step.query_start_loc, step.request, step.positions, size
    owner, token, _, _, place = same(
        "tiles", *arguments, step.tokens // size + step.requests
    )
    real = sum(step.lengths)
    assert token.flatten()[place[:real]].tolist() == list(range(real))
    assert (owner[place[:real] // size] == step.request[:real]).all()


@runs
@pytest.mark.parametrize("shape", [(5,), (3, 2)])
def test_rotations(shape):
    g = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 100_000, shape, generator=g).to(DEVICE)
    theta = (torch.rand(6, generator=g) * 0.1).to(DEVICE)
    # Angles of some thousand radians, at which a fast cosine is off.
    rotation = same("rotations", positions, theta)
    torch.testing.assert_close(rotation.abs(), torch.ones_like(rotation.real))


@runs
@pytest.mark.parametrize("pitch", [4, 12])
def test_slot_rows(pitch):
    slots = torch.tensor([0, -1, 15, 16, 97, 1 << 40, -1], device=DEVICE)
    rows = same("slot_rows", slots, 16, 4, pitch)
    assert rows[:5].tolist() == [0, -1, 3, pitch, 6 * pitch]


@runs
@EVERY_STEP
@pytest.mark.parametrize("length", [4, 131])
def test_ring_slots(step, length):
    table = step.table(1)
    table[0] = 0
    positions = step.positions
    positions[sum(step.lengths) :] = -7
    where = step.query_start_loc, step.request, positions, length
    slots = same("ring_slots", table, *where)
    assert (slots[sum(step.lengths) :] == -1).all()
    written = slots[slots >= 0]
    assert len(written.unique()) == len(written)


@runs
@EVERY_STEP
@pytest.mark.parametrize("size", [1, 6, 128])
@pytest.mark.parametrize("replays", [False, True])
def test_window_rows(step, size, replays):
    owner, start, last = step.tiles(size)
    visible = torch.arange(step.requests, device=DEVICE) * 20 if replays else None
    # One block too few: what is beyond is in the last.
    blocks = Blocks(step.table(3), 64, 192)
    same("window_rows", blocks, owner, start, last, visible, size, 19)


@runs
@EVERY_STEP
@pytest.mark.parametrize("queries", [1, 6])
def test_block_rows(step, queries):
    owner, start, _ = step.tiles(queries)
    blocks = Blocks(step.table(3), 64, 64)
    same("block_rows", blocks, owner, start, step.seq_lens, queries, 19)


@runs
@EVERY_STEP
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("queries", ["all", "none"])
def test_entry_rows(step, size, queries):
    owner, start, last = step.tiles(size)
    entries, blocks = int(step.seq_lens.max()) // 4, Blocks(step.table(2), 32, 96)
    many = size if queries == "all" else 0
    same("entry_rows", blocks, owner, start, last, many, entries, 4)


@runs
@EVERY_STEP
def test_selected_rows(step):
    g = torch.Generator().manual_seed(0)
    selected = torch.randint(-1, 60, (step.tokens, 20), generator=g).to(DEVICE)
    same("selected_rows", Blocks(step.table(2), 32, 96), step.request, selected)


@runs
@EVERY_STEP
@pytest.mark.parametrize(("ratio", "sources"), [(4, 8), (16, 16)])
def test_pooled_rows(step, ratio, sources):
    parts, size = (4, 4) if sources > ratio else (2, 8)
    tokens = step.tokens
    blocks = Blocks(step.table(300 // size + 1), size, 3 * size * parts, parts)
    slots = torch.arange(tokens, device=DEVICE) * 7 + 64
    slots[sum(step.lengths) :] = -1
    # A replayed token, whose entry is there.
    slots[::5] = -1
    theta = torch.tensor([1.0, 0.1, 0.01], device=DEVICE)
    count = min(tokens, tokens // ratio + step.requests)
    entries = Blocks(step.table(1), 64 // ratio, 50)
    positions = step.positions
    where = step.request, positions, slots, count, ratio, sources, theta
    _, _, write, _ = same("pooled_rows", blocks, entries, *where)
    completes = (positions % ratio == ratio - 1) & (slots >= 0)
    assert (write >= 0).sum() == completes.sum()


@runs
def test_blocks_that_are_not_a_table_are_read_by_torch():
    """As those of a ring unrolled, whose rows a kernel cannot find."""

    class Twice(Blocks):
        plain = False

        def ids(self, request, row):
            return 2 * row

    step = STEPS[1]
    owner, start, last = step.tiles(1)
    blocks = Twice(step.table(1), 64, 64)
    ids, _ = same("window_rows", blocks, owner, start, last, None, 1, 5)
    assert ids[3].tolist() == [392, 394, 396, 398, 400]
    same("block_rows", blocks, owner, start, step.seq_lens, 1, 5)
    same("entry_rows", blocks, owner, start, last, 1, 8, 4)
    same("selected_rows", blocks, owner, torch.zeros_like(start).unsqueeze(1))
    slots, theta = torch.zeros_like(start), torch.ones(2, device=DEVICE)
    same("pooled_rows", blocks, blocks, owner, start, slots, 4, 4, 8, theta)
