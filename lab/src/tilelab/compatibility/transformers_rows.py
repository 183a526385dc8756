"""Rows of ``docs/compatibility.md`` for transformers' attention interfaces."""

from __future__ import annotations

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_ATTENTION = ("AttentionInterface",)
_MASK = ("AttentionMaskInterface",)

_INTRO = """
`tilewise.integrations.transformers.register()` registers two implementations with transformers,
version 5 of it. `unregister` undoes it.

With `attn_implementation="tilewise"`:

- **Masks** are expressions and never tensors of queries x keys.
- **Tested** with transformers 5.23.0 on the CPU. Llama, Mistral, Gemma 2, GPT-2, BERT, Qwen 3,
  T5, Whisper, ViT and gpt-oss with random weights give what `"eager"` gives. So does a
  pretrained encoder.
- **Queries that see no key**, such as padding on the left, give 0. With eager they give the mean
  of all values.

`attn_implementation="tilewise_paged"` is for `tilewise.serving.generate` alone
([serving](serving.md)), with causal decoders whose layers see all keys or a window. It takes
`scaling`, `softcap`, `s_aux` and `sliding_window`. It refuses by name what pages cannot hold.
"""

TABLES = (
    Table(
        title="`tilewise.integrations.transformers`",
        intro=_INTRO,
        functions=(*_ATTENTION, *_MASK),
        rows=(
            Row(
                _ATTENTION,
                "query, key, value",
                "covered",
                "key and value with fewer heads are not repeated; under autocast in its dtype",
            ),
            Row(
                _ATTENTION,
                "attention_mask",
                "covered",
                "from the mask interface; your own 4-D tensor, boolean or additive, is read as it "
                "is, and is dense",
            ),
            Row(
                _ATTENTION,
                "attention_mask=None",
                "covered",
                "causal where the layer is, as with `sdpa`",
            ),
            Row(_ATTENTION, "scaling", "covered"),
            Row(
                _ATTENTION,
                "dropout",
                "covered",
                "by a counter-based generator; `torch.manual_seed` "
                "repeats it; drops other pairs than eager",
            ),
            Row(
                _ATTENTION,
                "keys that a model appends after its mask was made",
                "refused",
                "DeepSeek-V4's compressed layers: `attn_implementation='eager'`",
            ),
            Row(_ATTENTION, "is_causal", "covered", "counts where there is no mask"),
            Row(_ATTENTION, "softcap", "covered", "Gemma 2"),
            Row(_ATTENTION, "position_bias", "covered", "T5, with its gradient"),
            Row(_ATTENTION, "s_aux", "covered", "the sinks of gpt-oss, with their gradient"),
            Row(
                _ATTENTION,
                "sliding_window",
                "accepted",
                "the mask has it; refused without a mask if it is smaller than the keys",
            ),
            Row(
                _ATTENTION,
                "cu_seq_lens_q, cu_seq_lens_k",
                "covered",
                "where the mask does not hold "
                "sequences or padding; eager and `sdpa` do not read them",
            ),
            Row(
                _ATTENTION,
                "output_attentions=True",
                "refused",
                'weights are never written: `model.set_attn_implementation("eager")` for that call',
            ),
            Row(_ATTENTION, "head_mask", "refused", "it scales weights"),
            Row(
                _ATTENTION,
                "cache",
                "refused",
                "continuous batching (`generate_batch`): `tilewise.serving.generate` does it",
            ),
            Row(
                _MASK,
                "batch_size, q_length, kv_length, kv_offset",
                "covered",
                "the keys of a static cache that are not yet there are left out",
            ),
            Row(
                _MASK,
                "q_offset",
                "covered",
                "a tensor is read once for a step, but not inside of a graph; compiled steps of "
                "`generate` are not tested (on GPUs it compiles with a static cache; "
                "`disable_compile=True` turns that off)",
            ),
            Row(
                _MASK,
                "mask_function",
                "covered",
                "traced: causal, window, chunks, packed sequences, "
                "blocks of images, any user's in the language of masks; others are refused by name",
            ),
            Row(
                _MASK,
                "attention_mask",
                "covered",
                "2-D padding: lengths where it is on the right, else a boolean per key; on a GPU, "
                "and under `torch.compile(fullgraph=True)` and `torch.export`, nothing is read, "
                "and one graph serves every length and padding",
            ),
            Row(
                _MASK,
                "dtype, config, device, use_vmap, local_size, allow_is_causal_skip, "
                "allow_is_bidirectional_skip",
                "accepted",
                "there is no tensor to make or to leave out",
            ),
        ),
    ),
)
