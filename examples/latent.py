"""Multi-head latent attention: all heads read one latent vector a token, in the absorbed form.

    in the paper:  k[h, n] = (up_k[h] c[n], r[n])     v[h, n] = up_v[h] c[n]
    absorbed:      key (c[n], r[n]), value c[n], of all heads; the query of head h becomes
                   (up_k[h]^T q[h], the rotated part of q[h]), and up_v[h] follows the attention

The values are the first numbers of the keys, so a cache holds each token once.

Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, 2024, section 2.1.
"""

# %%
import torch

import tilewise

torch.manual_seed(0)
HEADS, WIDTH, ROTATED, LATENT = 16, 128, 64, 512  # as in DeepSeek-V2-Lite
SCALE = (WIDTH + ROTATED) ** -0.5
up_k, up_v = torch.randn(2, HEADS, WIDTH, LATENT) * LATENT**-0.5


# %% Decode: each token appends its latent vector, and reads those of the tokens before.
cache = tilewise.serving.PagedKVCache(
    pages=80, page_size=16, kv_heads=1, head_dim=LATENT + ROTATED, value_dim=LATENT, latent=True
)
sequence = cache.add()
latents = torch.randn(1, 1, 1016, LATENT + ROTATED)  # (c, r) of each token
prompt = 1000
cache.append([sequence], latents[:, :, :prompt])
queries = torch.randn(1, HEADS, 1016, WIDTH + ROTATED)
out = []
for token in range(prompt, 1016):
    now = slice(token, token + 1)
    cache.append([sequence], latents[:, :, now])
    plain, rotated = queries[:, :, now].split([WIDTH, ROTATED], -1)
    absorbed = torch.cat([plain @ up_k, rotated], -1)
    out.append(cache.attend([sequence], absorbed, scale=SCALE) @ up_v.mT)

# %% The same in plain torch, by keys and values of all heads.
c, r = latents.split([LATENT, ROTATED], -1)
k = torch.cat([c @ up_k.mT, r.expand(-1, HEADS, -1, -1)], -1)
v = c @ up_v.mT
scores = queries[:, :, prompt:] @ k.mT * SCALE
later = torch.arange(1016) > torch.arange(prompt, 1016)[:, None]
due = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
assert torch.allclose(torch.cat(out, 2), due, atol=1e-4)
print(f"{len(out)} tokens decoded: the same output")

# %%
one, other = latents.nbytes // 1016, (k.nbytes + v.nbytes) // 1016
print(f"a token takes {one:,} bytes of cache; its keys and values take {other:,}")
assert cache.v_pages.data_ptr() == cache.k_pages.data_ptr()  # values take none
