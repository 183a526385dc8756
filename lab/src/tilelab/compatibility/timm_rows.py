"""Rows of ``docs/compatibility.md`` for timm's models."""

from __future__ import annotations

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_SWITCH = ("enable", "disable")

_INTRO = """
`report = tilewise.integrations.timm.enable(model)` switches one model, and `disable(model)`
switches it back.

- **What changes.** While a layer of the model is in its forward, the
  `F.scaled_dot_product_attention` that it calls is `tilewise.attention`.
- **Why a switch.** timm has no list of implementations to register in, so each model has a
  switch of its own. Nothing is patched.
- **Tested** with timm 1.0.31 and random weights on the CPU. ViT, BEiT, EVA, rotary ViT and Swin
  give what timm's path that writes the weights gives. The ViTs include blocks in parallel,
  differential attention, pooling by attention and relative position bias.
"""

TABLES = (
    Table(
        title="`tilewise.integrations.timm`",
        intro=_INTRO,
        functions=_SWITCH,
        rows=(
            Row(
                _SWITCH,
                "layers with fused_attn",
                "covered",
                "of every model, also Swin, for which timm leaves it off; outputs, gradients, "
                "`torch.compile(fullgraph=True)`, autocast, checkpoints, copies and pickles; the "
                "state dict is the model's",
            ),
            Row(
                _SWITCH,
                "relative position bias",
                "covered",
                "a captured tensor [H, N, N] with its gradient, from the table that timm learns",
            ),
            Row(
                _SWITCH,
                "mask of Swin's shifted windows",
                "covered",
                "read in place, [windows, N, N], and not repeated for heads and images; pairs of "
                "other regions, to which timm adds -100, are left out",
            ),
            Row(_SWITCH, "attn_drop", "covered", "`torch.manual_seed` repeats it; other pairs"),
            Row(
                _SWITCH,
                "a call that tilewise does not cover",
                "accepted",
                "left to torch, and counted with the reason: `print(report)`",
            ),
            Row(
                _SWITCH,
                "layers that compute weights themselves",
                "accepted",
                "Swin V2's cosine attention, talking heads and others: they stay as they are, and "
                "the report names them",
            ),
            Row(
                _SWITCH, "a model with no layer to switch", "refused", "the error says what it has"
            ),
            Row(_SWITCH, "while tilewise.sdpa() is on", "accepted", "that switch takes the calls"),
            Row(_SWITCH, "torch.jit.script", "refused", "by torch: `disable(model)` first"),
        ),
    ),
)
