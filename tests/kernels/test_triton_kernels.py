"""The Triton kernels in Triton's interpreter, on the CPU, against their torch twins.

In a process of their own: the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import itertools, math, torch
from hybridgen.offload.fetch_kernel import fetch_rows
from hybridgen.selection.budget import choose, group_probabilities
from hybridgen.selection.choose_kernel import choose_rows
from hybridgen.types import KeepRule

generator = torch.Generator().manual_seed(0)
rules = [KeepRule(0.1, None, 8), KeepRule(None, 0.9, 0), KeepRule(0.3, 0.95, 64)]
rules += [KeepRule(5, None, 0), KeepRule(None, 1.0, 0)]
shapes = [(1, 2, 1, 128, 30), (3, 2, 3, 192, 70), (2, 1, 4, 64, 5)]
for rule, (batch, heads, group, rows, local_rows), ties in itertools.product(rules, shapes, (False, True)):
    lengths = [rows - 64 * (index % (rows // 64)) for index in range(batch)]
    host = 3 * torch.randn(batch, heads, group, rows, generator=generator)
    local = torch.randn(batch, heads, group, local_rows, generator=generator)
    if ties:
        host, local = host.round(), local.round()
    local[..., ::3] = -math.inf
    for index, length in enumerate(lengths):
        host[index, ..., length:] = math.nan  # never read
    clean = host.nan_to_num(nan=0.0)
    host_p, local_p = group_probabilities(local, clean, lengths)
    expected, found = choose(rule, host_p, local_p, lengths), choose_rows(local, host, lengths, rule)
    for b, h in itertools.product(range(batch), range(heads)):
        wanted = int(expected.counts[b, h])
        kept = found.rows[b, h, : found.counts[b, h]].tolist()
        assert kept == sorted(set(kept)) and all(row < lengths[b] for row in kept)
        assert abs(len(kept) - wanted) <= 1, (rule, lengths, len(kept), wanted)
        p = host_p[b, h]
        best = set(expected.rows[b, h, :wanted].tolist())
        for row in best ^ set(kept):  # only where p cannot be told apart, or the mass lies on the threshold
            edge = p[expected.rows[b, h, wanted - 1]] if wanted else torch.tensor(0.0)
            covered = float(local_p[b, h] + p[list(best)].sum())
            on_threshold = rule.mass is not None and abs(covered - rule.mass) < 1e-5
            assert abs(float(p[row] - edge)) <= 1e-6 * float(edge) or on_threshold, (rule, b, h, row)
        assert abs(float(found.mass[b, h] - local_p[b, h] - p[kept].sum())) < 1e-5
        assert found.padding[b, h, 0].tolist() == [i >= len(kept) for i in range(found.rows.shape[2])]
        assert found.rows[b, h, len(kept):].eq(0).all()

for dim, count in ((8, 1), (80, 2), (128, 2)):
    tables = [torch.randn(2, 3, 100, dim, generator=generator).half() for _ in range(count)]
    rows = torch.randint(100, (2, 3, 45), generator=generator)
    counts = torch.tensor([[45, 0, 7], [1, 44, 45]])
    targets = [torch.full((2, 3, 45, dim), -7.0).half() for _ in range(count)]
    fetch_rows(tables, rows, counts, targets)
    for table, target in zip(tables, targets):
        for b, h in itertools.product(range(2), range(3)):
            n = int(counts[b, h])
            assert torch.equal(target[b, h, :n], table[b, h, rows[b, h, :n]])
            assert (target[b, h, n:] == -7.0).all(), "padding is left alone"

from hybridgen.attention.base import attention_logits, group_by_kv_head, joint_attention
from hybridgen.attention.decode_kernel import attend_rows

sizes = [(1, 4, 4, 128), (3, 6, 2, 80), (2, 3, 1, 8)]
for (batch, heads, kv_heads, dim), kept in itertools.product(sizes, (0, 1, 70)):
    query = torch.randn(batch, heads, dim, generator=generator)
    keys, values = torch.randn(2, batch, kv_heads, 300, dim, generator=generator)
    empty = torch.rand(batch, 1, 1, 300, generator=generator) < 0.5
    counts = torch.randint(kept + 1, (batch, kv_heads), generator=generator)
    fetched = list(torch.randn(2, batch, kv_heads, kept, dim, generator=generator))
    padding = (torch.arange(kept) >= counts.unsqueeze(-1)).unsqueeze(2)
    grouped = group_by_kv_head(query, kv_heads)
    logits = [attention_logits(grouped, keys, empty, 0.3), attention_logits(grouped, fetched[0], padding, 0.3)]
    expected = joint_attention(logits, [values, fetched[1]]).reshape(batch, heads, dim)
    poisoned = [t.masked_fill(empty.view(batch, 1, 300, 1), math.nan) for t in (keys, values)]
    rows = [t.masked_fill(padding.transpose(2, 3), math.nan) for t in fetched] if kept else [None, None]
    context, log_sum = attend_rows(query, *poisoned, empty, *rows, counts, 0.3)
    torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)
    total = torch.logsumexp(torch.cat(logits, -1), -1).reshape(batch, heads)
    torch.testing.assert_close(log_sum, total, rtol=1e-5, atol=1e-5)
print("checked")
"""


def test_kernels_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "checked" in done.stdout, done.stderr[-2000:]
