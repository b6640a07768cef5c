"""The two tiers over thousands of steps: no token in both or in neither, none with another's K or V.

Every K and V element holds a number that no other has, so that a row is known by what it contains.
Host memory starts as NaN: a row that was never written shows up as soon as it is read.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridgen.kv_cache.layout import WindowLayout, host_shape
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.host_memory import HostSlab, padded_bytes
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, TransferEngine
from hybridgen.telemetry import Telemetry

BLOCK = 64
HEADS, DIM = 2, 2
SPEC = LayerSpec(num_heads=4, num_kv_heads=HEADS, head_dim=DIM, rope=None)
CPU = torch.device("cpu")
MOST_TOKENS = 100_000  # a sequence's; 3 sequences of these rows stay below 2**24, exact in float32

TRANSFERS = [ImmediateTransfer, LazyTransfer]


class Walk:
    """One layer's cache, driven as the engine drives it, beside a model of it in plain integers."""

    def __init__(
        self,
        transfer: type[TransferEngine],
        sinks: int,
        window: int,
        batch: int,
        capacity: int,
        layer: int = 0,
        num_layers: int = 1,
    ) -> None:
        layout = WindowLayout(sinks, window)
        shape = host_shape(SPEC, batch, layout, capacity)
        slab = HostSlab(2 * padded_bytes(shape, torch.float32), CPU, poison=True)
        # contracts.md: 'W + 64 + floor(64 l / L) rows (staggered over the L layers)'
        self.threshold = window + BLOCK + (BLOCK * layer) // num_layers
        self.kv = TieredKV(
            SPEC,
            batch,
            capacity,
            layout,
            layout.ageing_threshold(layer, num_layers),
            CPU,
            torch.float32,
            slab,
            slab,
            transfer(Telemetry()),
        )
        self.sinks, self.window, self.capacity, self.ring = sinks, window, capacity, layout.ring
        self.lengths = [0] * batch
        self.host = [0] * batch
        self.due = [False] * batch  # the oldest block is on its way
        self.admits = self.ageings = 0

    def rows(self, sequence: int, first: int, last: int, value: bool) -> torch.Tensor:
        """What tokens [first, last) of a sequence hold: [Hkv, n, d]."""
        return self.tagged(sequence, torch.arange(first, last), value)

    def tagged(self, sequence: int, position: torch.Tensor, value: bool) -> torch.Tensor:
        head = torch.arange(HEADS, dtype=torch.float32).view(HEADS, 1, 1)
        number = (position + sequence * MOST_TOKENS).view(1, -1, 1) + head / 4
        pair = torch.cat((number, -number), dim=-1)
        return -1.0 - pair if value else 1.0 + pair

    def store(self, new: list[int]) -> None:
        """A prompt, or one more turn of it, as `Runner.prefill` does it."""
        for sequence, tokens in enumerate(new):
            past, length = self.lengths[sequence], self.lengths[sequence] + tokens
            keys = torch.full((HEADS, length, DIM), torch.nan)
            values = keys.clone()
            if past:
                self.kv.load_past(sequence, keys, values)
                self.admitted()
                for given_back, value in ((keys, False), (values, True)):
                    expected = self.rows(sequence, 0, past, value)
                    assert torch.equal(given_back[:, :past], expected), "load_past: tokens or order"
                    assert given_back[:, past:].isnan().all(), "load_past wrote beyond the past"
            keys[:, past:] = self.rows(sequence, past, length, value=False)
            values[:, past:] = self.rows(sequence, past, length, value=True)
            self.kv.store(sequence, keys, values, queries=keys[:, -8:].transpose(0, 1), first_piece=64)
            self.admitted()
            self.lengths[sequence] = length
            prefilled = BLOCK * (max(0, length - self.sinks - self.window) // BLOCK)
            self.host[sequence] = max(self.host[sequence], prefilled)
            for ticket in self.kv.pending():
                ticket.wait_host()

    def step(self, again: bool = False) -> None:
        """One decode step: submission, attention, ageing; `again` calls twice what must not mind it."""
        self.admit()
        if again:
            self.admit()
        pairs = [self._new_row(sequence) for sequence in range(len(self.lengths))]
        slots = torch.tensor([self.kv.layout.slot(length) for length in self.lengths])
        self.kv.write(torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs]), slots)
        self.kv.grow()
        self.lengths = [length + 1 for length in self.lengths]
        for _ in range(1 + again):
            self.kv.age()
        for sequence, length in enumerate(self.lengths):
            window = max(0, length - self.sinks) - self.host[sequence]
            if not self.due[sequence] and window >= self.threshold:
                self.due[sequence] = True
                self.ageings += 1
        self.check_device()  # a block on its way still belongs to the window

    def admit(self) -> None:
        lengths = self.kv.admit()
        self.admits += 1
        self.admitted()
        assert lengths == self.host == self.kv.host_lengths
        lengths[0] += 1  # the caller's own list: frozen, not the cache's
        assert self.kv.host_lengths == self.host
        self.check()

    def admitted(self) -> None:
        """Blocks on their way have joined the host."""
        self.host = [host + BLOCK * due for host, due in zip(self.host, self.due, strict=True)]
        self.due = [False] * len(self.due)

    def check(self) -> None:
        self.check_device()
        for sequence, host in enumerate(self.host):
            assert host % BLOCK == 0
            first = min(self.sinks, self.lengths[sequence])
            for buffer, value in ((self.kv.host_keys.in_place, False), (self.kv.host_values, True)):
                assert buffer is not None
                found = buffer.tensor[sequence]
                assert torch.equal(found[:, :host], self.rows(sequence, first, first + host, value))
                assert found[:, 0].isfinite().all(), "padding points to row 0"
                assert found[:, max(1, host) :].isnan().all(), "a row that is in no tier was written"

    def check_device(self) -> None:
        """Sinks and window are visible, each token once and in its slot; nothing else is."""
        assert self.kv.lengths == self.lengths
        assert self.kv.keys.isfinite().all() and self.kv.values.isfinite().all()
        for sequence, (length, host) in enumerate(zip(self.lengths, self.host, strict=True)):
            window = max(0, length - self.sinks) - host
            assert self.kv.window_length(sequence) == window <= self.ring
            oldest = self.sinks + host
            sinks = torch.arange(min(self.sinks, length))
            where = torch.cat((sinks, torch.arange(oldest, oldest + window)))
            slots = torch.cat((sinks, self.sinks + (where[len(sinks) :] - self.sinks) % self.ring))
            visible = ~self.kv.empty[sequence, 0, 0]
            assert torch.equal(slots.sort().values, visible.nonzero().flatten())
            for local, value in ((self.kv.keys, False), (self.kv.values, True)):
                expected = self.tagged(sequence, where, value)
                assert torch.equal(local[sequence, :, slots], expected)

    def _new_row(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.lengths[sequence]
        key, value = (self.rows(sequence, at, at + 1, is_value)[:, 0] for is_value in (False, True))
        return key, value


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(
    ("sinks", "window", "layer", "num_layers"),
    [(4, 128, 0, 5), (0, 1, 4, 5), (1, 100, 29, 30), (3, 63, 2, 3)],
)
def test_a_long_walk(transfer: type[TransferEngine], sinks: int, window: int, layer: int, num_layers: int) -> None:
    """Hundreds of steps each, the sequences far apart in length, with further turns on the way."""
    draw = random.Random(window)
    walk = Walk(transfer, sinks, window, batch=2, capacity=1500, layer=layer, num_layers=num_layers)
    walk.store([7, window + 150])
    for step in range(700):
        if step % 211 == 210:
            walk.store([draw.randrange(1, 120), draw.randrange(1, 120)])
        walk.step(again=draw.random() < 0.1)
    walk.admit()
    assert walk.admits > 700
    assert walk.ageings > 8, "this walk was meant to age blocks"
    assert min(walk.host) > 500


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.data_too_large])
@given(data=st.data())
def test_any_walk(data: st.DataObject) -> None:
    """Any window, sinks, layer and batch; turns and steps in any order."""
    batch = data.draw(st.integers(1, 3), "batch")
    num_layers = data.draw(st.integers(1, 40), "layers")
    walk = Walk(
        data.draw(st.sampled_from(TRANSFERS), "transfer"),
        sinks=data.draw(st.integers(0, 4), "sinks"),
        window=data.draw(st.integers(1, 200), "window"),
        batch=batch,
        capacity=1200,
        layer=data.draw(st.integers(0, num_layers - 1), "layer"),
        num_layers=num_layers,
    )
    for _ in range(data.draw(st.integers(1, 3), "turns")):
        turn = st.one_of(st.integers(1, 8), st.integers(1, 260))
        walk.store(data.draw(st.lists(turn, min_size=batch, max_size=batch), "prompts"))
        if data.draw(st.booleans(), "look"):
            walk.admit()
        for _ in range(data.draw(st.integers(0, 110), "steps")):
            walk.step()
    walk.admit()


@pytest.mark.parametrize("num_layers", [1, 2, 30, 40, 80])
def test_layers_age_in_turn(num_layers: int) -> None:
    """The threshold of contracts.md, and that it spreads the layers over 64 steps."""
    window = 96
    layout = WindowLayout(sinks=4, window=window)
    thresholds = [layout.ageing_threshold(layer, num_layers) for layer in range(num_layers)]
    assert thresholds == [window + 64 + (64 * layer) // num_layers for layer in range(num_layers)]
    assert thresholds == sorted(thresholds)
    busiest = max(thresholds.count(threshold) for threshold in thresholds)
    assert busiest <= -(-num_layers // 64)
    assert max(thresholds) < layout.ring, "the ring must still have a slot when the last layer ages"


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_the_first_block_leaves_at_the_threshold(layer: int) -> None:
    """Not a step earlier, not a step later, and it is on the host from the next submission on."""
    walk = Walk(LazyTransfer, sinks=2, window=10, batch=1, capacity=400, layer=layer, num_layers=6)
    walk.store([2 + 10])
    steps = 0
    while walk.kv.admit() == [0]:
        walk.step()
        steps += 1
    assert steps == 64 + (64 * layer) // 6  # the window held 10 rows


@pytest.mark.parametrize("tokens", [0, 1, 13, 14, 76, 77, 78, 141, 142, 1000])
def test_host_rows_after_a_prefill(tokens: int) -> None:
    layout = WindowLayout(sinks=4, window=10)
    assert layout.host_rows(tokens) == 64 * (max(0, tokens - 4 - 10) // 64)


def test_a_short_sequence_beside_long_ones_stays_out_of_the_host() -> None:
    walk = Walk(LazyTransfer, sinks=4, window=16, batch=3, capacity=900)
    walk.store([1, 300, 700])
    walk.admit()
    assert walk.host[0] == 0 < walk.host[1] < walk.host[2]
    for _ in range(70):
        walk.step()
    assert walk.host[0] == 0
