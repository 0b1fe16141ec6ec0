"""How the page looks, on light and dark screens and on paper."""

# Series colours: Okabe and Ito's palette (2008), which colour-blind readers can tell apart,
# darkened on light ground where the original is too faint for thin lines.
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f6f7f9; --text: #1b1f24;
  --faint: #5b6470; --rule: #d9dee4; --notice: #fff6dd; --notice-rule: #c98a00;
  --s0: #0072b2; --s1: #d55e00; --s2: #00805f; --s3: #b0508a; --s4: #8a6d00; --s5: #1b8ac0;
  --s6: #555c66; --s7: #a33a00; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --panel: #1d2127; --text: #e7eaee; --faint: #a3acb8;
    --rule: #39414b; --notice: #332a10; --notice-rule: #e69f00;
    --s0: #56b4e9; --s1: #ff8f3d; --s2: #2fc79c; --s3: #e39ac6; --s4: #f0e442; --s5: #8fd0f5;
    --s6: #b6bec9; --s7: #ffb38a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header, main { max-width: 1360px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; } header p { color: var(--faint); margin: 0 0 20px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 40px 0 12px; }
.notice { background: var(--notice); border-left: 4px solid var(--notice-rule); padding: 10px 16px;
  border-radius: 4px; overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; }
.tiles div { background: var(--panel); border-radius: 8px; padding: 12px 18px; flex: 1 1 150px; }
.tiles dd { margin: 0; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dt { color: var(--faint); font-size: .85rem; }
.columns { display: grid; gap: 20px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: 14px 16px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
figure > svg { width: 100%; height: auto; display: block; font-size: 12px; }
svg text { fill: var(--faint); } svg .axis { fill: var(--text); font-size: 13px; }
svg .label { fill: var(--text); font-size: 11px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
svg .mark { fill: currentColor; stroke: var(--panel); stroke-width: 1; }
.c0 { color: var(--s0); } .c1 { color: var(--s1); } .c2 { color: var(--s2); }
.c3 { color: var(--s3); } .c4 { color: var(--s4); } .c5 { color: var(--s5); }
.c6 { color: var(--s6); } .c7 { color: var(--s7); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0;
  padding: 0; font-size: .85rem; } .legend li { display: flex; align-items: center; gap: 6px; }
.key { width: 14px; height: 14px; flex: none; }
.scroll { overflow-x: auto; border-radius: 8px; background: var(--panel); padding: 8px 12px 12px; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
caption { text-align: left; color: var(--faint); padding: 4px 0 8px; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; } thead th { vertical-align: bottom; color: var(--faint); font-weight: 600; }
tbody th { font-weight: 600; } tbody tr:last-child > * { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
details { background: var(--panel); border-radius: 8px; padding: 10px 16px; margin-bottom: 8px; }
summary { cursor: pointer; font-weight: 600; }
summary small { color: var(--faint); font-weight: 400; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: .875rem; }
.facts dt { color: var(--faint); } .facts dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .8rem; background: var(--ground); padding: 12px;
  border-radius: 6px; }
.empty { color: var(--faint); } footer, main { padding-bottom: 48px; }
@media print { .scroll { overflow: visible; } details { break-inside: avoid; } }
"""
