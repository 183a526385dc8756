"""Sparse attention of DeepSeek-V3.2: an indexer in float8 picks the keys that each row reads.

    score[m, n] = k_scale[n] * sum_h w[m, h] * q_scale[m, h] * relu(index_q[m, h] . index_k[n])
    row m sees: the top_k keys of the largest scores, of those up to key m

The indexer's queries and keys are rounded to float8, with a scale for each row.

Source: DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse
Attention", 2025, equations 1 and 2.
"""

# %%
import resource

import torch
from torch.nn import functional

import tilewise

torch.manual_seed(0)
torch.set_num_threads(1)
N, TOP_K, D = 2048, 128, 64
q, k, v = torch.randn(1, 4, N, D), torch.randn(1, 1, N, D), torch.randn(1, 1, N, D)
index_q, index_k, w = torch.randn(1, 8, N, D), torch.randn(1, 1, N, D), torch.rand(1, N, 8)


def float8(x):
    """Return x in float8 and a scale for each of its rows."""
    scale = x.abs().amax(-1) / 448
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def peak():
    """Return the most memory that the process had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# %% No scores of heads x rows x keys: the best keys are found in blocks, then read alone.
(index_q, q_scale), (index_k, k_scale) = float8(index_q), float8(index_k)
print(f"the indexer's keys: {index_k.nbytes + k_scale.nbytes:,} bytes, float32 {4 * N * D:,}")
w, causal = w * q_scale.transpose(1, 2), tilewise.masks.causal()
options = {"mask": causal, "key_scales": k_scale, "scale": 1.0, "return_scores": True}
tilewise.top_keys(index_q[:, :, :64], index_k, w[:, :64], TOP_K, **options)  # warm-up
before = peak()
keys, scores = tilewise.top_keys(index_q, index_k, w, TOP_K, **options)
out = tilewise.attention(q, k, v, keys=keys)
print(f"top_keys and attention over its lists: {peak() - before:.0f} MiB")

# %% The same in plain torch, by all scores and a mask.
products = (index_q.float() @ index_k.float().mT).relu_()
every = torch.einsum("bhmn,bmh->bmn", products, w)[:, None] * k_scale[:, :, None]
every.masked_fill_(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
assert torch.allclose(scores, every.topk(TOP_K).values, atol=1e-4)
seen = torch.zeros(1, 1, N, N + 1, dtype=torch.bool)
seen.scatter_(3, torch.where(keys < 0, N, keys).long(), True)
due = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[..., :N], enable_gqa=True)
assert torch.allclose(out, due, atol=1e-5)
print(f"by all scores and a mask: {peak() - before:.0f} MiB; the same scores and output")
