"""What of timm's models is covered, for ``docs/compatibility.md``."""

from __future__ import annotations

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_SWITCH = ("enable", "disable")

_INTRO = """
`report = tilewise.integrations.timm.enable(model)`, and `disable(model)`: while a layer of the
model is in its forward, the `F.scaled_dot_product_attention` that it calls is `tilewise.attention`.
timm has no list of implementations to register in, so the switch is a model's own; nothing is
patched.
Tested with timm 1.0.31, random weights, on the CPU: ViT (also with blocks in parallel, differential
attention, pooling by attention, relative position bias), BEiT, EVA, rotary ViT and Swin give what
timm's path that writes the weights gives.
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
                "of every model, Swin's too, for which timm leaves it off; outputs, gradients, "
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
                "read where it lies, [windows, N, N], and not spread over heads and images; pairs "
                "of other regions, to which timm adds -100, are left out",
            ),
            Row(_SWITCH, "attn_drop", "covered", "repeated by `torch.manual_seed`; other pairs"),
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
            Row(_SWITCH, "a model with no layer to switch", "refused", "named with what it has"),
            Row(_SWITCH, "while tilewise.sdpa() is on", "accepted", "the calls are that switch's"),
            Row(_SWITCH, "torch.jit.script", "refused", "by torch: `disable(model)` first"),
        ),
    ),
)
