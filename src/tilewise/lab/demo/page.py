"""The report as one HTML page: nothing to load, light and dark, fit for a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from tilewise.lab.demo import words
from tilewise.lab.demo.contest import WARMUP, Arm
from tilewise.lab.demo.figures import gap_figure, long_memory_figure, long_time_figure, loss_figure
from tilewise.lab.demo.longtable import Cell
from tilewise.lab.demo.record import Record
from tilewise.lab.demo.verdict import FIRST_STEPS, Check, Pace, gaps, pace
from tilewise.lab.demo.worker import EVALUATION_WINDOWS, PROMPT
from tilewise.nn import Implementation

# Plain first: the others are compared with it.
_LONG_ORDER: tuple[Implementation, ...] = ("plain", "sdpa", "tilewise")


def render(record: Record) -> str:
    """The page. Every text that comes from outside is escaped."""
    style = resources.files("tilewise.lab.demo").joinpath("report.css").read_text("utf-8")
    sections = [
        _header(record),
        _kpis(record),
        _curves(record),
        _step_table(record),
        _long_section(record),
        _sample(record),
        _method(record),
        _facts(record),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>tilewise demo</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _paces(record: Record) -> tuple[Pace | None, Pace | None]:
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    return pace(plain, record.tokens), pace(tilewise, record.tokens)


def _headline(record: Record) -> str:
    if not record.complete:
        return "Stopped early: what was seen so far"
    if not all(check.passed for check in record.checks()):
        return "The losses do not agree as they should"
    plain, tilewise = _paces(record)
    if plain is None or tilewise is None:
        return "Same model, same losses"
    faster = plain.wall_s / tilewise.wall_s
    how = "faster" if faster >= 1.0 else "slower"
    return f"Same model, same losses, steps {words.times(max(faster, 1 / faster))} {how}"


def _header(record: Record) -> str:
    settings, text = record.settings, record.corpus
    status = "" if record.complete else f'<p class="status">{escape(record.status)}</p>'
    return f"""<header>
<p class="brand">tilewise demo</p>
<h1>{escape(_headline(record))}</h1>
<p class="lead">A byte-level GPT ({settings.layers} layers, width {settings.width},
{settings.heads} heads, context {settings.context:,}) learned from {escape(text.name)}. It was
trained with plain attention, which writes an N &times; N matrix, and with tilewise, which never
does: same code, same seed, same data, one argument different.</p>
{status}</header>"""


def _kpi(label: str, value: str, more: str) -> str:
    return (
        f'<li><span class="label">{label}</span><span class="value">{words.typeset(value)}</span>'
        f'<span class="more">{words.typeset(more)}</span></li>'
    )


def _kpis(record: Record) -> str:
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    cards = []
    seen = gaps(tilewise, plain)[:FIRST_STEPS]
    if seen:
        more = f"largest relative gap, first {len(seen)} steps (limit 1e-05)"
        cards.append(_kpi("Loss, plain against tilewise", words.gap(max(seen)), more))
    pace_plain, pace_tilewise = _paces(record)
    if pace_plain and pace_tilewise:
        ratio = words.saving(pace_plain.wall_s, pace_tilewise.wall_s)
        more = f"{words.seconds(pace_plain.wall_s)} &rarr; {words.seconds(pace_tilewise.wall_s)}"
        cards.append(_kpi("Time of a training step", ratio, f"{more}, median"))
    if plain.peak_bytes and tilewise.peak_bytes:
        ratio = words.saving(plain.peak_bytes, tilewise.peak_bytes)
        more = f"{words.size(plain.peak_bytes)} &rarr; {words.size(tilewise.peak_bytes)}"
        cards.append(_kpi("Peak memory of training", ratio, f"{more}, process"))
    longest = [c for c in record.cells if c.implementation == "tilewise" and c.peak_bytes]
    if longest:
        cards.append(_longest_kpi(record, longest[-1]))
    return f'<ul class="kpis">{"".join(cards)}</ul>'


def _longest_kpi(record: Record, cell: Cell) -> str:
    assert cell.peak_bytes is not None
    rows = [c for c in record.cells if c.context == cell.context and c.implementation == "plain"]
    needs = "".join(
        f"; plain {'took' if c.peak_bytes else 'needs'} "
        f"{words.size(c.peak_bytes or c.estimate_bytes or 0)}"
        for c in rows
        if c.peak_bytes or c.estimate_bytes
    )
    more = f"for one step of {cell.context:,} bytes{needs}"
    return _kpi("Memory at the longest context", words.size(cell.peak_bytes), more)


def _check_item(check: Check) -> str:
    if check.passed is None:
        kind, mark = "open", "&hellip;"
    else:
        kind, mark = ("passed", "&#10003;") if check.passed else ("failed", "&#10007;")
    return (
        f'<li class="{kind}"><span class="mark">{mark}</span>'
        f"<b>{words.typeset(escape(check.title))}</b>{words.typeset(escape(check.says))}</li>"
    )


def _curves(record: Record) -> str:
    items = "".join(_check_item(check) for check in record.checks())
    return f"""<h2>Do they learn the same?</h2>
<p>Both arms start from the same weights and see the same bytes in the same order, so their losses
may differ by rounding alone. What rounding can do is seen in two more plain runs, whose initial
weights were each moved to the next float32 number, up or down.</p>
<div class="charts">{loss_figure(record)}{gap_figure(record)}</div>
<ul class="checks">{items}</ul>"""


def _row(name: str, note: str, values: list[str], best: int | None = None) -> str:
    cells = "".join(
        f"<td{' class=best' if index == best else ''}>{value}</td>"
        for index, value in enumerate(values)
    )
    small = f"<small>{note}</small>" if note else ""
    return f"<tr><th>{name}{small}</th>{cells}</tr>"


def _step_table(record: Record) -> str:
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    pace_plain, pace_tilewise = _paces(record)
    rows = []
    if pace_plain and pace_tilewise:
        rows += _pace_rows(pace_plain, pace_tilewise)
    for name, note, one, other in (
        (
            "Peak memory",
            "of the process, over what it held before the model",
            plain.peak_bytes,
            tilewise.peak_bytes,
        ),
        (
            "Kept for the backward pass",
            "by autograd, all layers",
            plain.saved_bytes,
            tilewise.saved_bytes,
        ),
    ):
        if one and other:
            values = [words.size(one), words.size(other), words.times(one / other)]
            rows.append(_row(name, note, values, 1 if other < one else 0))
    rows.append(_attention_row(record))
    if plain.held_out and tilewise.held_out:
        apart = words.gap(abs(plain.held_out - tilewise.held_out) / plain.held_out)
        note = f"nats per byte, {EVALUATION_WINDOWS} windows never trained on"
        values = [
            f"{plain.held_out:.6f}",
            f"{tilewise.held_out:.6f}",
            words.typeset(f"{apart} apart"),
        ]
        rows.append(_row("Held-out loss", note, values))
    return f"""<h2>What does a training step cost?</h2>
<div class="table"><table><thead>
<tr><th class="left"></th><th>plain</th><th>tilewise</th><th>ratio</th></tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
<p class="note">{record.tokens:,} bytes a step ({record.settings.batch} windows of
{record.settings.context:,}), {_threads(record)}, float32, forward, backward and
optimizer. Attention is only a part of a step; the rest costs both arms the same.</p>"""


def _pace_rows(plain: Pace, tilewise: Pace) -> list[str]:
    def spread(arm: Pace) -> str:
        return f"{words.seconds(arm.low_s)} to {words.seconds(arm.high_s)}"

    faster = 1 if tilewise.wall_s < plain.wall_s else 0
    wall = [f"{words.seconds(arm.wall_s)}<small>{spread(arm)}</small>" for arm in (plain, tilewise)]
    cpu = [words.seconds(arm.cpu_s) for arm in (plain, tilewise)]
    rate = [f"{arm.tokens_per_s:,.0f}" for arm in (plain, tilewise)]
    cpu_rate = [f"{arm.tokens_per_cpu_s:,.0f}" for arm in (plain, tilewise)]
    ratio, cpu_ratio = plain.wall_s / tilewise.wall_s, plain.cpu_s / tilewise.cpu_s
    return [
        _row(
            "Step time",
            "wall clock: median, first to ninth decile",
            [*wall, words.times(ratio)],
            faster,
        ),
        _row("CPU time of a step", "all threads together: median", [*cpu, words.times(cpu_ratio)]),
        _row("Tokens per second", "a token is a byte", [*rate, words.times(ratio)], faster),
        _row("Tokens per CPU second", "", [*cpu_rate, words.times(cpu_ratio)]),
    ]


def _attention_row(record: Record) -> str:
    settings = record.settings
    rows = settings.batch * settings.heads * settings.context
    plain = rows * settings.context * 4 + settings.context**2
    tilewise = settings.batch * settings.context * settings.width * 4 + 3 * rows * 4
    values = [words.size(plain), words.size(tilewise), words.times(plain / tilewise)]
    note = "one layer, beside q, k and v; <b>computed, not measured</b>"
    return _row("Attention keeps for backward", note, values)


def _long_section(record: Record) -> str:
    if not record.cells:
        return ""
    contexts = sorted({cell.context for cell in record.cells})
    head = "".join(
        f"<th{' class=start' if index == 0 else ''}>{name}</th>"
        for _ in range(2)
        for index, name in enumerate(_LONG_ORDER)
    )
    body = "".join(_long_row(record, context) for context in contexts)
    return f"""<h2>And with a long context?</h2>
<p>One forward and backward of the same model on one window. Plain attention grows with the square
of the window in memory too, so it runs only where an estimate says that it fits. <b>sdpa</b> is
torch's own fused attention, for comparison: plain is not the best that torch can do.</p>
<div class="charts">{long_memory_figure(record)}{long_time_figure(record)}</div>
<div class="table" style="margin-top:16px"><table><thead>
<tr><th class="left" rowspan="2">window</th><th class="group" colspan="3">time</th>
<th class="group" colspan="3">peak memory</th></tr>
<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="note">Peak memory is that of a process of its own, over what it held before the model was
built. Time is wall clock on {_threads(record)}. Small print under a plain cell is
the estimate made before the step.</p>"""


def _long_row(record: Record, context: int) -> str:
    found = {c.implementation: c for c in record.cells if c.context == context}
    row = [found.get(name) for name in _LONG_ORDER]
    times = [None if cell is None else cell.wall_s for cell in row]
    peaks = [None if cell is None else cell.peak_bytes for cell in row]
    cells = [_time_cell(cell, times) for cell in row] + [_memory_cell(cell, peaks) for cell in row]
    return f"<tr><th>{context:,}</th>{''.join(cells)}</tr>"


def _classes(cell: Cell, value: float, others: Sequence[float | None]) -> str:
    """The best value of a row stands out; the first column of a group has a rule."""
    names = ["start"] if cell.implementation == _LONG_ORDER[0] else []
    if value == min(other for other in others if other is not None):
        names.append("best")
    return f' class="{" ".join(names)}"' if names else ""


def _time_cell(cell: Cell | None, row: Sequence[float | None]) -> str:
    if cell is None:
        return '<td class="none">not reached</td>'
    if cell.wall_s is None:
        return '<td class="start none">not run</td>'
    plain = row[0]
    note = ""
    if cell.implementation != _LONG_ORDER[0] and plain is not None:
        note = f"<small>{words.saving(plain, cell.wall_s)}</small>"
    return f"<td{_classes(cell, cell.wall_s, row)}>{words.seconds(cell.wall_s)}{note}</td>"


def _estimate(cell: Cell) -> str:
    guess = cell.estimate_bytes
    return "" if guess is None else f"<small>estimate {words.size(guess)}</small>"


def _memory_cell(cell: Cell | None, row: Sequence[float | None]) -> str:
    if cell is None:
        return '<td class="none">not reached</td>'
    if cell.peak_bytes is None:
        return f'<td class="start none">{escape(cell.reason)}{_estimate(cell)}</td>'
    note, plain = _estimate(cell), row[0]
    if plain is not None and not note:
        note = f"<small>{words.saving(plain, cell.peak_bytes)}</small>"
    return f"<td{_classes(cell, cell.peak_bytes, row)}>{words.size(cell.peak_bytes)}{note}</td>"


def _printable(text: str) -> str:
    """Bytes as text: what is no UTF-8 and what does not print becomes a visible mark."""
    decoded = text.encode("latin-1").decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{SYMBOL FOR SUBSTITUTE}" for c in decoded
    )


def _sample(record: Record) -> str:
    mine, other = record.arm("tilewise").sample, record.arm("plain").sample
    if mine is None or other is None:
        return ""
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
    drawn = same - len(PROMPT)
    compared = (
        "The plain arm writes the same text, byte for byte."
        if same == len(mine)
        else f"The plain arm writes the same first {drawn} bytes, then rounding tips a draw."
    )
    prompt, rest = mine[: len(PROMPT)], mine[len(PROMPT) :]
    return f"""<h2>What the model writes</h2>
<p>After {record.settings.steps} steps it has learned letters, indentation and some habits of its
text, no more. {compared}</p>
<pre class="sample"><mark>{escape(_printable(prompt))}</mark>{escape(_printable(rest))}</pre>"""


def _method(record: Record) -> str:
    settings = record.settings
    return f"""<h2>How it was measured</h2>
<ul class="plain-list">
<li>One model code; the arms differ in <code>implementation=</code> of
<code>tilewise.nn.Attention</code>. Plain is <code>softmax(mask(q k<sup>T</sup>)) v</code> in torch
operations, masking in place.</li>
<li>Each arm has a process of its own, so that its peak memory is its own: resident memory at its
highest, less what the process held with torch warmed up and the text read. The processes take turns
of a few steps and only one computes at a time, so that whatever else the machine does falls on
all alike.</li>
<li>The first {WARMUP} steps of each arm are left out of the times, not out of the losses.</li>
<li>The two nudged plain runs are part of the protocol and cost as much as the plain one; without
them the end of the run could be judged only by taste. The gap at the end is the root mean square
over the last tenth of the steps. It passes if it is no larger than the larger of the two nudged
runs', or than one float32 spacing of the loss.</li>
<li>AdamW, peak learning rate {settings.learning_rate:g}, gradient clipping at 1, seed
{settings.seed}. The text is drawn at temperature 0.8 from a seeded generator.</li>
</ul>"""


def _facts(record: Record) -> str:
    text = record.corpus
    facts = {
        "text": f"{text.name}: {len(text.data):,} bytes of {words.count(text.files, 'file')}",
        "sha256": text.sha256,
        **record.environment,
        "whole run": words.seconds(record.seconds),
    }
    facts |= {f"{arm.name} said": arm.warnings for arm in record.arms if arm.warnings}
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    steps = ", ".join(f"{arm.name} {_steps(arm)}" for arm in record.arms)
    return f"""<h2>Where it ran</h2>
<dl class="facts">{items}</dl>
<footer>Steps done: {escape(steps)}. Every loss and every time is in
<a href="report.json">report.json</a> beside this page.</footer>"""


def _threads(record: Record) -> str:
    return words.count(record.settings.threads, "thread")


def _steps(arm: Arm) -> str:
    return f"{len(arm.losses):,}"
