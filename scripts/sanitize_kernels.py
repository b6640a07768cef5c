"""Each Triton kernel at a handful of odd sizes against its torch twin: a program for NVIDIA's sanitizer.

    compute-sanitizer --tool memcheck python3 scripts/sanitize_kernels.py      (or racecheck)

Under TRITON_INTERPRET=1 it runs on the CPU, as a test does. Prints OK, or ends with the first assertion that failed.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# torch's caching allocator hands out pieces of large blocks: an access past a tensor's end would go unseen.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from hybridgen.attention.base import attention_logits, group_by_kv_head, joint_attention
from hybridgen.attention.decode_kernel import attend_rows
from hybridgen.attention.resident import splits_for
from hybridgen.attention.resident_kernel import attend_resident
from hybridgen.kv_cache.quantize import (
    SKETCH_BITS,
    SKETCH_BLOCK,
    dequantize_int8,
    key_mean,
    make_sketch,
    quantize_int8,
    sketch_logits,
)
from hybridgen.kv_cache.sketch_kernel import score_sketch
from hybridgen.kv_cache.write_kernel import write_token
from hybridgen.models.norm_kernel import norm_rows
from hybridgen.offload.fetch_kernel import fetch_rows
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.groupwise_kernel import decode_rows
from hybridgen.offload.host_memory import HostSlab, padded_bytes
from hybridgen.selection import choose_kernel
from hybridgen.selection.budget import KeepLimits, choose, group_probabilities, keep_limits, most_by_alpha
from hybridgen.selection.choose_kernel import choose_rows
from hybridgen.selection.eviction.base import Prompt
from hybridgen.selection.eviction.h2o import summed_probabilities
from hybridgen.selection.eviction.keyformer import noisy_sums, prompt_bits
from hybridgen.selection.eviction.prompt_scores_kernel import column_sums
from hybridgen.selection.host_logits import LINK_TOKENS, HostLogits
from hybridgen.types import KeepRule, TokenSelection

MASS_TOLERANCE = 1e-5  # of a float32 sum over thousands of rows

DIM, SCALE = 24, 0.2  # of the choosing query

# batch, KV heads, query heads of each, scored rows, local rows, whether many rows are equal
CHOICE_SHAPES = [(1, 2, 1, 128, 30, False), (1, 1, 1, 97, 3, True), (3, 1, 3, 193, 70, True), (2, 2, 4, 64, 5, False)]
CHOICE_SHAPES += [(1, 1, 2, 5000, 7, True)]  # more than one split
# rule, how many times longer than what is scored the host is, extra
CHOICES = [
    (KeepRule(0.1, None, 8), 1, 1.0),
    (KeepRule(0.3, None, 0), 2, 1.5),
    (KeepRule(5, None, 0), 1, 4.0),
    (KeepRule(None, None, 0), 3, 1.001),
    (KeepRule(None, 1.0, 0), 1, 1.0),
    (KeepRule(None, 0.9, 0), 1, 1.0),
    (KeepRule(None, 0.9, 7), 2, 1.3),
    (KeepRule(0.3, 0.95, 64), 1, 1.0),
    (KeepRule(0.1, 0.95, 300), 4, 2.5),  # a floor above what is scored
    (KeepRule(None, 1e-6, 0), 1, 3.0),  # the local rows hold it
]

# batch, query heads, KV heads, channels
ATTENTION_SHAPES = [(1, 2, 2, 128), (3, 4, 2, 80), (2, 3, 1, 64)]

# query heads, KV heads, channels, keys, queries, dtype: blocks in part and in full, a further turn, one token
PROMPT_SHAPES = [(2, 2, 128, 140, 140, torch.float16), (4, 2, 80, 150, 70, torch.float16)]
PROMPT_SHAPES += [(2, 1, 64, 128, 128, torch.float32), (2, 2, 96, 131, 1, torch.float32)]
PROMPT_SHAPES += [(1, 1, 24, 1, 1, torch.float16), (2, 1, 256, 65, 33, torch.float16)]


def main() -> int:
    """Check all of them; returns the exit status."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        print("sanitize_kernels: no CUDA device (TRITON_INTERPRET=1 runs it on the CPU)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if interpreted else torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator(device).manual_seed(0)
    checks = (check_choices, check_long_choices, check_nothing_to_choose, check_mass_out_of_reach)
    checks += (check_wide_choice, check_choices_in_half, check_choices_by_alpha)
    checks += (check_sketch_scores, check_fetches, check_decoding_fetches)
    checks += (check_attention, check_resident_attention, check_prompt_scores, check_norms, check_writes)
    checks += (check_groupwise,)
    for check in checks:
        check(device, generator)
        print(check.__name__, flush=True)
    print("OK")
    return 0


class Chooser:
    """A query, and the device's keys that it is weighed with; what is in an empty slot is NaN."""

    def __init__(
        self, batch: int, kv_heads: int, group: int, local_rows: int, device: torch.device, generator: torch.Generator
    ) -> None:
        self.query = torch.randn(batch, kv_heads * group, DIM, generator=generator, device=device)
        keys = torch.randn(batch, kv_heads, local_rows, DIM, generator=generator, device=device)
        self.empty = torch.zeros(batch, 1, 1, local_rows, dtype=torch.bool, device=device)
        self.empty[..., ::3] = True
        grouped = group_by_kv_head(self.query, kv_heads)
        self.local_logits = attention_logits(grouped, keys, self.empty, SCALE)
        self.keys = keys.masked_fill(self.empty.view(batch, 1, local_rows, 1), math.nan)

    def choose(self, host: Tensor, limits: KeepLimits) -> tuple[TokenSelection, Tensor]:
        """host: [B, Hkv, G, N]."""
        return choose_rows(self.query, self.keys, self.empty, host.flatten(1, 2), limits, SCALE)


def check_choices(
    device: torch.device, generator: torch.Generator, shapes: Sequence[tuple[int, int, int, int, int, bool]] = ()
) -> None:
    """By count and by mass, grouped queries, ragged batches, with ties and without."""
    for batch, heads, group, rows, local_rows, ties in shapes or CHOICE_SHAPES:
        scored = [max(0, rows - 61 * index) for index in range(batch)]
        host = 3 * torch.randn(batch, heads, group, rows, generator=generator, device=device)
        if ties:
            host = host.round()
        chooser = Chooser(batch, heads, group, local_rows, device, generator)
        for rule, longer, extra in CHOICES:
            limits = keep_limits(rule, [longer * n for n in scored], scored, extra)
            check_choice(chooser, host, limits)


def check_long_choices(device: torch.device, generator: torch.Generator) -> None:
    """Rows of several blocks by one program: in registers, and read again at each look where they do not fit.

    A program a KV head is what many KV heads get: with few, many programs share the row (`check_choices`).
    """
    most_held, few = choose_kernel.MOST_HELD, choose_kernel.FEW_PROGRAMS
    choose_kernel.FEW_PROGRAMS = 0
    for choose_kernel.MOST_HELD in (most_held, 0):
        check_choices(device, generator, CHOICE_SHAPES[-1:])
    choose_kernel.MOST_HELD, choose_kernel.FEW_PROGRAMS = most_held, few


def check_choice(chooser: Chooser, host: Tensor, limits: KeepLimits) -> None:
    """host: what lies beyond `limits.scored` is overwritten with NaN, and must not be read."""
    clean = host.clone()
    for b, scored in enumerate(limits.scored):
        host[b, ..., scored:] = math.nan
        clean[b, ..., scored:] = 0.0
    wanted_p, local_p = group_probabilities(chooser.local_logits, clean, limits.scored)
    found, p = chooser.choose(host, limits)
    torch.testing.assert_close(p, wanted_p, rtol=1e-4, atol=1e-7)
    twin = choose(limits, p, local_p)
    assert found.host_lengths == limits.scored and found.rows.shape[2] == limits.widest

    # On the CPU from here: one copy for hundreds of looks.
    p, local_p, rows, counts = p.cpu(), local_p.cpu(), found.rows.cpu(), found.counts.cpu()
    padding, mass, twin_counts = found.padding.cpu(), found.mass.cpu(), twin.counts.cpu()
    for b, h in itertools.product(range(p.shape[0]), range(p.shape[1])):
        scored, count = limits.scored[b], int(counts[b, h])
        best = torch.sort(p[b, h, :scored], descending=True, stable=True)
        held = torch.cat((local_p[b, h].view(1), best.values)).double().cumsum(0)
        fewest, most = _allowed_counts(limits, b, held)
        where = (limits, b, h, fewest, count, int(twin_counts[b, h]), most)
        assert fewest <= count <= most and fewest <= int(twin_counts[b, h]) <= most, where
        kept = sorted(best.indices[:count].tolist())
        assert rows[b, h].tolist() == kept + [0] * (limits.widest - count), where
        assert padding[b, h, 0].tolist() == [i >= count for i in range(limits.widest)], where
        assert abs(float(mass[b, h] - local_p[b, h] - p[b, h, kept].sum())) < MASS_TOLERANCE, where


def _allowed_counts(limits: KeepLimits, sequence: int, held: Tensor) -> tuple[int, int]:
    """The least and the largest K: they differ where the mass lies on a row's edge. held[n]: the mass of n rows."""
    least, most, scored = (values[sequence] for values in (limits.least, limits.most, limits.scored))
    if limits.mass is None:
        return limits.kept(most, scored), limits.kept(most, scored)
    needed = [int((held < limits.mass + by).sum()) for by in (-MASS_TOLERANCE, MASS_TOLERANCE)]
    own = [most if n == len(held) else min(max(n, least), most) for n in needed]
    return limits.kept(own[0], scored), limits.kept(own[1], scored)


def check_nothing_to_choose(device: torch.device, generator: torch.Generator) -> None:
    """No row scored, or none wanted: an empty selection, and p all the same."""
    for rows, scored, most in ((0, [0, 0], [9, 0]), (70, [0, 0], [9, 3]), (70, [70, 41], [0, 0])):
        host = torch.randn(2, 3, 2, rows, generator=generator, device=device)
        chooser = Chooser(2, 3, 2, 11, device, generator)
        check_choice(chooser, host, KeepLimits(scored, most, most))
    limits = KeepLimits([0, 41], [2, 0], [90, 90], 0.5, 1500)  # one of two sequences
    check_choice(chooser, host, limits)


def check_mass_out_of_reach(device: torch.device, generator: torch.Generator) -> None:
    """Where the scored rows do not hold the mass, the count is the most that is allowed."""
    host = torch.randn(3, 2, 2, 200, generator=generator, device=device)
    host[..., 20:] = -300.0  # so unlikely that p is 0
    chooser = Chooser(3, 2, 2, 11, device, generator)
    for extra_thousandths in (1000, 1400):
        limits = KeepLimits([200, 123, 1], [5, 0, 8], [60, 400, 90], 1.5, extra_thousandths)
        selection, _ = chooser.choose(host, limits)
        expected = [min(200, 60 * extra_thousandths // 1000), 123, 1]
        assert selection.counts.tolist() == [[k, k] for k in expected], selection.counts
        check_choice(chooser, host, limits)


def check_wide_choice(device: torch.device, generator: torch.Generator) -> None:
    """As long a row as stays in registers, all of it equal but for two: the counts fill their 16 bits."""
    rows = choose_kernel.MOST_HELD
    host = torch.zeros(1, 1, 1, rows, device=device)
    host[..., 7::20_000] = 1.0
    chooser = Chooser(1, 1, 1, 70, device, generator)
    for keep in (1, 5000):
        check_choice(chooser, host, KeepLimits([rows], [keep], [keep]))
    host[..., 7::20_000] = 0.0
    check_choice(chooser, host, KeepLimits([rows], [rows], [rows]))
    host = torch.randn(1, 1, 1, rows + 1, generator=generator, device=device)  # one more than fits
    check_choice(chooser, host, KeepLimits([rows + 1], [300], [300]))


def check_choices_in_half(device: torch.device, generator: torch.Generator) -> None:
    """Logits as they cross the link give what the float32 ones give that they stand for."""
    for batch, heads, group, rows in ((2, 2, 1, 700), (1, 1, 3, 5000)):
        scored = [rows - 61 * index for index in range(batch)]
        shape = (batch, heads * group, -(-rows // LINK_TOKENS))
        maxima = 5000 * torch.randn(shape, generator=generator, device=device)
        values = -torch.rand(*shape[:2], rows, generator=generator, device=device).half() * 7
        maxima[:, :, :] = maxima.round() / 1000
        logits = HostLogits(values, maxima)
        whole = logits.float()
        for b, length in enumerate(scored):
            values[b, :, length:] = math.nan
            maxima[b, :, -(-length // LINK_TOKENS) :] = math.nan
        chooser = Chooser(batch, heads, group, 70, device, generator)
        limits = keep_limits(KeepRule(0.1, None, 8), scored, scored)
        found, p = choose_rows(chooser.query, chooser.keys, chooser.empty, logits, limits, SCALE)
        twin, twin_p = choose_rows(chooser.query, chooser.keys, chooser.empty, whole, limits, SCALE)
        assert torch.equal(p, twin_p) and torch.equal(found.rows, twin.rows) and torch.equal(found.mass, twin.mass)


def check_choices_by_alpha(device: torch.device, generator: torch.Generator) -> None:
    """The most that is kept lies on the device, and is not what the limits say."""
    rules = (KeepRule(None, None, 0, 3.0), KeepRule(0.2, None, 7, 2.0), KeepRule(None, None, 0, math.inf))
    for batch, heads, group, rows, local_rows, _ in CHOICE_SHAPES:
        scored = [max(0, rows - 61 * index) for index in range(batch)]
        host = 2 * torch.randn(batch, heads, group, rows, generator=generator, device=device)
        chooser = Chooser(batch, heads, group, local_rows, device, generator)
        for rule in rules:
            limits = keep_limits(rule, scored)
            most = most_by_alpha(limits, chooser.local_logits, host)
            logits = host.flatten(1, 2)
            found, p = choose_rows(chooser.query, chooser.keys, chooser.empty, logits, limits, SCALE, most)
            local_p = group_probabilities(chooser.local_logits, host, scored)[1]
            twin = choose(limits, p, local_p, most)
            assert torch.equal(found.counts, twin.counts) and torch.equal(found.counts, most.expand_as(found.counts))
            assert rule.alpha != math.inf or most.flatten().tolist() == scored
            torch.testing.assert_close(found.mass, twin.mass, rtol=0, atol=MASS_TOLERANCE)
            for b, h in itertools.product(range(batch), range(heads)):
                count = int(found.counts[b, h])
                assert found.rows[b, h, :count].tolist() == sorted(twin.rows[b, h, :count].tolist()), (limits, b, h)


def check_sketch_scores(device: torch.device, generator: torch.Generator) -> None:
    """Ragged lengths, channels that fill no power of two, blocks that nobody wrote."""
    for bits, (kv_heads, group, dim), lengths in itertools.product(
        SKETCH_BITS, ((2, 1, 128), (1, 3, 80), (2, 4, 64), (1, 2, 8)), ([64, 640, 0], [320, 256, 384])
    ):
        keys = torch.randn(3, kv_heads, 640, dim, generator=generator, device=device)
        keys[..., ::5] *= 100
        sketch = make_sketch(keys, bits)
        for sequence, length in enumerate(lengths):
            sketch[sequence, :, length // SKETCH_BLOCK :] = 255  # NaN as scale and zero
        query = torch.randn(3, kv_heads * group, dim, generator=generator, device=device)
        found = score_sketch(query, sketch, bits, lengths, SCALE)
        assert found.shape == (3, kv_heads * group, max(lengths))
        for sequence, length in enumerate(lengths):
            wanted = sketch_logits(query[sequence:][:1], sketch[sequence:][:1], bits, length, SCALE)
            largest = float(wanted.abs().amax()) if length else 0.0
            torch.testing.assert_close(found[sequence : sequence + 1, :, :length], wanted, rtol=0, atol=1e-5 * largest)


def check_fetches(device: torch.device, generator: torch.Generator) -> None:
    """Rows of one table or two, in host memory that the device reads."""
    for dim, tables, kept in ((64, 1, 45), (80, 2, 45), (128, 2, 33), (8, 1, 1), (80, 2, 0)):
        shape = (2, 3, 100, dim)
        slab = HostSlab(tables * padded_bytes(shape, torch.float16), device)
        sources = [slab.take(shape, torch.float16) for _ in range(tables)]
        for source in sources:
            source.tensor.copy_(torch.randn(shape, generator=generator, device=device))
        rows = torch.randint(100, (2, 3, kept), generator=generator, device=device)
        counts = torch.tensor([[kept, 0, min(kept, 7)], [min(kept, 1), max(kept - 1, 0), kept]], device=device)
        targets = [torch.full((2, 3, kept, dim), -7.0, dtype=torch.float16, device=device) for _ in sources]
        fetch_rows([source.device_view for source in sources], rows, counts, targets)
        for source, target in zip(sources, targets, strict=True):
            wanted = torch.gather(source.tensor, 2, rows.cpu().unsqueeze(-1).expand(-1, -1, -1, dim))
            padding = torch.arange(kept) >= counts.cpu().unsqueeze(-1)
            wanted[padding] = -7.0  # padding is left alone
            assert torch.equal(target.cpu(), wanted), (dim, tables, kept)


def check_decoding_fetches(device: torch.device, generator: torch.Generator) -> None:
    """int8 codes become keys on their way; V beside them does not change."""
    shape, kept = (2, 3, 100, 80), 45
    keys = torch.randn(shape, generator=generator, device=device) + 3
    mean = key_mean(keys)
    codes, scales = quantize_int8(keys, mean)
    parts = [codes, torch.randn(shape, generator=generator, device=device).half(), scales.unsqueeze(-1)]
    slab = HostSlab(sum(padded_bytes(tuple(part.shape), part.dtype) for part in parts), device)
    host = [slab.take(tuple(part.shape), part.dtype) for part in parts]
    for buffer, part in zip(host, parts, strict=True):
        buffer.tensor.copy_(part)
    rows = torch.randint(100, (2, 3, kept), generator=generator, device=device)
    counts = torch.tensor([[kept, 0, 7], [1, kept - 1, kept]], device=device)
    targets = [torch.full((2, 3, kept, 80), -7.0, dtype=torch.float16, device=device) for _ in range(2)]
    tables = [buffer.device_view for buffer in host]
    fetch_rows(tables[:2], rows, counts, targets, (tables[2], mean))
    padding = (torch.arange(kept, device=device) >= counts.unsqueeze(-1)).unsqueeze(-1)
    there = rows.unsqueeze(-1).expand(-1, -1, -1, 80)
    whole = (dequantize_int8(codes, scales, mean, torch.float16), parts[1])
    for target, table, tolerance in zip(targets, whole, (2e-3, 0.0), strict=True):
        wanted = table.gather(2, there).masked_fill(padding, -7.0)
        torch.testing.assert_close(target, wanted, rtol=tolerance, atol=0)  # a sum may be rounded once or twice


def check_attention(device: torch.device, generator: torch.Generator) -> None:
    """One softmax over window and fetched rows; what is empty or padding holds NaN and is not read."""
    for (batch, heads, kv_heads, dim), kept in itertools.product(ATTENTION_SHAPES, (0, 1, 70)):
        query = torch.randn(batch, heads, dim, generator=generator, device=device)
        keys, values = torch.randn(2, batch, kv_heads, 300, dim, generator=generator, device=device)
        empty = torch.rand(batch, 1, 1, 300, generator=generator, device=device) < 0.5
        counts = torch.randint(kept + 1, (batch, kv_heads), generator=generator, device=device)
        fetched = list(torch.randn(2, batch, kv_heads, kept, dim, generator=generator, device=device))
        padding = (torch.arange(kept, device=device) >= counts.unsqueeze(-1)).unsqueeze(2)
        grouped = group_by_kv_head(query, kv_heads)
        logits = [attention_logits(grouped, keys, empty, 0.3), attention_logits(grouped, fetched[0], padding, 0.3)]
        expected = joint_attention(logits, [values, fetched[1]]).reshape(batch, heads, dim)
        k, v = (t.masked_fill(empty.view(batch, 1, 300, 1), math.nan) for t in (keys, values))
        fetched_k, fetched_v = (t.masked_fill(padding.transpose(2, 3), math.nan) if kept else None for t in fetched)
        context, log_sum = attend_rows(query, k, v, empty, fetched_k, fetched_v, counts, 0.3)
        torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)
        total = torch.logsumexp(torch.cat(logits, -1), -1).reshape(batch, heads)
        torch.testing.assert_close(log_sum, total, rtol=1e-5, atol=1e-5)


def check_resident_attention(device: torch.device, generator: torch.Generator) -> None:
    """Ragged lengths, more than one split; what lies beyond a length is NaN and is not read."""
    shapes = [*ATTENTION_SHAPES, (2, 2, 2, 24), (1, 17, 1, 8), (1, 2, 1, 256)]
    for (batch, heads, kv_heads, dim), lengths in itertools.product(shapes, ([1, 64, 2], [1100, 513, 300])):
        query = torch.randn(batch, heads, dim, generator=generator, device=device)
        keys, values = torch.randn(2, batch, kv_heads, max(lengths) + 7, dim, generator=generator, device=device)
        index = torch.tensor(lengths[:batch], device=device) - 1
        beyond = (torch.arange(keys.shape[2], device=device) > index.unsqueeze(1)).view(batch, 1, 1, -1)
        logits = attention_logits(group_by_kv_head(query, kv_heads), keys, beyond, 0.3)
        k, v = (tensor.masked_fill(beyond.transpose(2, 3), math.nan) for tensor in (keys, values))
        context, log_sum = attend_resident(query, k, v, index, splits_for(max(lengths)), 0.3)
        expected = joint_attention([logits], [values]).reshape(batch, heads, dim)
        torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(log_sum, torch.logsumexp(logits, -1).view(batch, heads), rtol=1e-5, atol=1e-5)


def check_prompt_scores(
    device: torch.device,
    generator: torch.Generator,
    shapes: Sequence[tuple[int, int, int, int, int, torch.dtype]] = PROMPT_SHAPES,
) -> None:
    """Column sums, with noise and without; what lies beyond the queries and the keys is NaN."""
    for shape in shapes:
        prompt = make_prompt(*shape, device, generator)
        queries_a_head = shape[0] // shape[1] * shape[4]
        bits = prompt_bits(-123456789, prompt)
        for tau in (None, 1.0, 1.7):
            found = column_sums(prompt, None if tau is None else (*bits, tau))
            wanted = summed_probabilities(prompt) if tau is None else noisy_sums(prompt, *bits, tau)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            # Each row of probabilities adds up to 1.
            torch.testing.assert_close(found.sum(-1), torch.full_like(found[:, 0], queries_a_head), rtol=1e-4, atol=0)


def make_prompt(
    heads: int, kv_heads: int, dim: int, rows: int, new: int, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> Prompt:  # fmt: skip
    """Of the keys before the new ones, each KV head holds a third, another one each."""
    past = rows - new
    queries = before_nan(torch.randn(new, heads, dim, generator=generator, device=device), dtype)
    keys = before_nan(torch.randn(kv_heads, rows, dim, generator=generator, device=device), dtype)
    held = torch.rand(kv_heads, 3 * past, generator=generator, device=device).argsort(-1)[:, :past].sort(-1).values
    fresh = torch.arange(3 * past, 3 * past + new, device=device).expand(kv_heads, new)
    positions = torch.cat((held, fresh), 1)
    return Prompt(queries, keys, positions, 2.0 / dim**0.5, 3 * past + new)


def before_nan(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, followed in memory by as much again that is NaN, and by 200 rows more."""
    memory = torch.full((2 * values.numel() + 200 * values.shape[-1],), math.nan, dtype=dtype, device=values.device)
    return memory[: values.numel()].view(values.shape).copy_(values)


def check_norms(device: torch.device, generator: torch.Generator) -> None:
    """LayerNorm and RMSNorm of a few rows, also far from zero, against float64."""
    for rows, width, offset in ((1, 5120, 0.0), (3, 576, 30.0), (64, 24, -5.0)):
        x = torch.randn(rows, width, generator=generator, device=device) + offset
        weight, bias = torch.randn(2, width, generator=generator, device=device)
        exact, scale, shift = x.double(), weight.double(), bias.double()
        layer_norm = torch.nn.functional.layer_norm(exact, (width,), scale, shift, 1e-5)
        torch.testing.assert_close(norm_rows(x, weight, bias, 1e-5).double(), layer_norm, rtol=1e-4, atol=1e-4)
        rms_norm = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * scale
        torch.testing.assert_close(norm_rows(x, weight, None, 1e-6).double(), rms_norm, rtol=1e-5, atol=1e-5)
        half = norm_rows(x.half(), weight.half(), None, 1e-6)
        assert half.dtype is torch.float16
        torch.testing.assert_close(half.double(), rms_norm, rtol=4e-3, atol=4e-3)


def check_writes(device: torch.device, generator: torch.Generator) -> None:
    """A token a sequence into its slot, from a view of a fused product or not; no other changes."""
    for batch, heads, rows, dim, dtype in ((1, 2, 5, 8, torch.float16), (3, 3, 70, 24, torch.float32)):
        keys, values = torch.full((2, batch, heads, rows, dim), math.nan, dtype=dtype, device=device)
        empty = torch.ones((batch, 1, 1, rows), dtype=torch.bool, device=device)
        fused = torch.randn(batch, 3, heads, dim, generator=generator, device=device).to(dtype)
        key, value = fused[:, 1], fused[:, 2].contiguous()
        slots = torch.randint(rows, (batch,), generator=generator, device=device)
        twins = keys.clone(), values.clone(), empty.clone()
        for b, slot in enumerate(slots.tolist()):
            twins[0][b, :, slot], twins[1][b, :, slot], twins[2][b, 0, 0, slot] = key[b], value[b], False
        write_token(key, value, slots, keys, values, empty)
        for made, twin in zip((keys, values, empty), twins, strict=True):
            torch.testing.assert_close(made, twin, rtol=0, atol=0, equal_nan=True)
        write_token(value, key, slots, keys, values)
        for b, slot in enumerate(slots.tolist()):
            assert torch.equal(keys[b, :, slot], value[b]) and torch.equal(values[b, :, slot], key[b])


def check_groupwise(device: torch.device, generator: torch.Generator) -> None:
    """Packed rows of odd widths, wide and narrow; constant groups, and the largest numbers of a type."""
    for dtype, bits, shape in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (4, 8), ((2, 3, 70, 80), (5, 128), (3, 1031), (1, 1), (0, 64))
    ):
        values = torch.randn(shape, generator=generator, device=device).mul_(30).to(dtype)
        if shape[0]:
            values[0].fill_(1 / 3)
        values[..., ::65] = 65504.0
        codec = GroupCodec(bits, dtype)
        packed, out = codec.encode(values), torch.full_like(values, math.nan)
        decode_rows(packed, bits, codec.pair_dtype, out)
        twin = codec.decode_in_torch(packed, torch.empty_like(values))
        assert out.isfinite().all()
        # A sum may be rounded once or twice.
        torch.testing.assert_close(out, twin, rtol=torch.finfo(dtype).eps, atol=1e-2 * torch.finfo(dtype).eps)


if __name__ == "__main__":
    sys.exit(main())
