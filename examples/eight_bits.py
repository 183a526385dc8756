"""A cache in 8 bits: int8 or float8 numbers with a float32 scale for each row, read as they are.

    scale[n] = max |k[n]| / 127        k_page[n] = round(k[n] / scale[n])          for int8
    a stored key stands for scale[n] * k_page[n]; values are stored alike

No key is widened in memory: kernels widen the numbers that they load.
"""

# %%
import torch

from tilewise.serving import PagedKVCache

torch.manual_seed(0)
TOKENS, HEADS, KV_HEADS, D = 3000, 16, 4, 128
k, v = torch.randn(2, 1, KV_HEADS, TOKENS, D)
q = torch.randn(1, HEADS, 1, D)


def plain(k, v):
    """Return attention of the last token by its definition."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def meant(pages, scales, table):
    """Return the rows [1, Hk, N, D] that pages of one sequence stand for."""
    rows = pages.float() if scales is None else pages.float() * scales[..., None]
    return rows[table[0].long()].transpose(0, 1).flatten(1, 2)[None, :, :TOKENS]


# %% Only ``storage`` differs: rows are rounded as they come, and every call stays what it is.
before = plain(k, v)
for storage in (None, torch.int8, torch.float8_e4m3fn):
    cache = PagedKVCache(pages=24, page_size=128, kv_heads=KV_HEADS, head_dim=D, storage=storage)
    sequence = cache.add()
    cache.append([sequence], k, v)
    out = cache.attend([sequence], q)

    table, _ = cache.tables([sequence])
    rows = meant(cache.k_pages, cache.k_scales, table), meant(cache.v_pages, cache.v_scales, table)
    assert torch.allclose(out, plain(*rows), atol=1e-5)  # exact for the rows that are stored

    held = cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales
    size = sum(each.nbytes for each in held if each is not None) / 2**20
    error = (out - before).norm() / before.norm()
    name = str(cache.k_pages.dtype).removeprefix("torch.")
    print(f"{name}: {size:.1f} MiB, and rounding the rows changed the output by {error:.2%}")
