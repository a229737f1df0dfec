"""The page of a report: one template, no script, nothing fetched.

Every value is escaped by jinja2 (extra `trainer`), transcripts first of all:
they hold whatever the agent wrote. Only the SVG of `curves` goes in as it is.
"""

from typing import Any

_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --raised: #f5f6f8; --ink: #1c2024; --faint: #646c76;
  --edge: #dde1e6; --agent: #3584d4; --tool: #c06a1c; --good: #23804a;
  --bad: #c0392b; --agent-ground: #eef5fc; --tool-ground: #fcf4ea;
  --bug-ground: #fbdcd8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --raised: #1d2126; --ink: #e4e7ea; --faint: #9aa3ad;
    --edge: #333a42; --agent: #6fb0ef; --tool: #e79a50; --good: #5cc489;
    --bad: #f08070; --agent-ground: #182635; --tool-ground: #2b2118;
    --bug-ground: #56241f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem;
  background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, 'Segoe UI', sans-serif;
}
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .35rem 0; max-width: 46rem; }
.faint, figcaption p { color: var(--faint); font-size: .875rem; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; font-size: .9rem; }
th, td {
  padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--edge);
}
th { font-weight: 600; }
td .good, td .bad { white-space: nowrap; }
td.number, th.number {
  text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap;
}
tr.total td { font-weight: 600; }
.scroll { overflow-x: auto; }
.plots {
  display: grid; gap: 1.75rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
.tables { display: flex; flex-wrap: wrap; gap: 2rem 4rem; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; margin-top: .4rem; }
figure svg text { font-family: inherit !important; }
.example { margin: 1.5rem 0 2rem; }
.sides {
  display: grid; gap: 1rem; margin-top: .5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
.side { border: 1px solid var(--edge); border-radius: 6px; min-width: 0; }
.side > header {
  padding: .5rem .8rem; background: var(--raised); font-size: .875rem;
  border-bottom: 1px solid var(--edge); border-radius: 6px 6px 0 0;
}
.part { border-left: 4px solid transparent; padding: .4rem .8rem; }
.part > b {
  font-size: .7rem; letter-spacing: .06em; text-transform: uppercase;
  color: var(--faint);
}
.part pre {
  margin: 0; font-size: .8125rem; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.agent { border-left-color: var(--agent); background: var(--agent-ground); }
.agent > b { color: var(--agent); }
.tool { border-left-color: var(--tool); background: var(--tool-ground); }
.tool > b { color: var(--tool); }
mark {
  background: var(--bug-ground); color: inherit; border-radius: 3px;
  padding: .1em .2em; margin-left: -.2em;
}
"""

_TEMPLATE = """
{%- macro percent(rate) -%}
{% if rate.tasks %}{{ '%.0f' % (100 * rate.rate) }}%{% else %}&ndash;{% endif %}
{%- endmacro %}

{%- macro solved(rate) -%}
<td class="number">{{ rate.solved }} / {{ rate.tasks }}</td>
<td class="number">{{ percent(rate) }}</td>
{%- endmacro %}

{%- macro solve_table(name, rows, total) %}
<div class="scroll"><table>
<thead><tr><th>{{ name }}</th>
<th class="number" colspan="2">version {{ first }}</th>
<th class="number" colspan="2">version {{ last }}</th></tr></thead>
<tbody>
{% for row in rows + [total] %}
<tr{% if row is sameas total %} class="total"{% endif %}>
<td>{{ row.name }}</td>{{ solved(row.before) }}{{ solved(row.after) }}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}

{%- macro side(version, shown) %}
<article class="side">
<header>version {{ version }}:
<span class="{{ 'good' if shown.passed else 'bad' }}">{{ shown.verdict }}</span>
<br><span class="faint">{{ shown.tokens }} tokens sampled,
{{ shown.turns }} turn{{ '' if shown.turns == 1 else 's' }},
ended by {{ shown.finish }}
{%- if shown.detail %}; {{ shown.detail }}{% endif %}</span></header>
{% for part in shown.parts %}
<div class="part {{ part.role }}"><b>{{ part.role }}</b>
<pre>
{% for line in part.lines %}
{% if loop.index0 == part.bug %}
<mark title="the line with the bug">{{ line }}</mark>
{% else %}
{{ line }}
{% endif %}
{% endfor %}
</pre></div>
{% endfor %}
</article>
{% endmacro -%}

<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ headline }}</p>
{% for line in gap_lines %}
<p class="{{ 'bad' if gaps_found else 'faint' }}">{{ line }}</p>
{% endfor %}

<h2>Results</h2>
<div class="scroll"><table>
<thead><tr><th>quantity</th><th class="number">value</th><th>limit</th>
<th></th></tr></thead>
<tbody>
{% for check in checks %}
<tr><td><code>{{ check.name }}</code></td>
<td class="number">{{ check.value }}</td><td>{{ check.limit }}</td>
<td>{% if check.passed is true %}<span class="good">&#10003; pass</span>
{%- elif check.passed is false %}<span class="bad">&#10007; fail</span>
{%- endif %}</td></tr>
{% endfor %}
</tbody></table></div>

<h2>Curves</h2>
<div class="plots">
{% for plot in plots %}
<figure>
<figcaption><h3>{{ plot.title }}</h3><p>{{ plot.note }}</p></figcaption>
{% if plot.svg %}
<div role="img" aria-label="{{ plot.title }}">{{ plot.svg | safe }}</div>
{% endif %}
{% if plot.absent %}
<p class="faint">not recorded: {{ plot.absent | join(', ') }}</p>
{% endif %}
</figure>
{% endfor %}
</div>

<h2>Trajectories before and after training</h2>
{% if compared %}
<p class="faint">Held-out tasks chosen by rule: the first two that failed at
version {{ first }} and passed at version {{ last }}, the first that still fails
and the first that passed in both, of different functions where there are. The
line with the bug is marked.</p>
{% for example in examples %}
<section class="example">
<h3><code>{{ example.task_id }}</code>: {{ example.outcome }}</h3>
<div class="sides">
{{ side(first, example.before) }}
{{ side(last, example.after) }}
</div>
</section>
{% endfor %}

<h2>Solve rate of held-out tasks</h2>
<p>{{ outcomes }}</p>
<div class="tables">
{{ solve_table('function', by_function, total) }}
{{ solve_table('kind of bug', by_kind, total) }}
</div>
{% else %}
<p class="faint">not recorded: it takes evaluations of two versions</p>
{% endif %}
</body>
</html>
"""


def render(content: dict[str, Any]) -> str:
  """Returns the HTML of a page.

  Args:
    content: what the template names; a missing name is an error.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
    jinja2.UndefinedError: the content lacks a name.
  """
  # Imported here: only who writes a page needs it.
  import jinja2

  environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
  )
  template = environment.from_string(_TEMPLATE.lstrip())
  return template.render(content, style=_STYLE)
