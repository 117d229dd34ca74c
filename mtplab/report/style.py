"""The page's looks and its small dictionary."""

from __future__ import annotations

CSS = """
:root{--ink:#1b1f24;--soft:#5b6470;--line:#e3e6ea;--paper:#fff;--card:#f7f8fa;--up:#0a7a4b;--down:#b3261e;
--draft:#cdeccf;--bonus:#c9e7f7;--correction:#fbe3b3}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa4b0;--line:#2c3239;--paper:#14171b;--card:#1c2026;
--up:#5fd39b;--down:#ff8a80;--draft:#1f4d2b;--bonus:#17435a;--correction:#5a4312}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 20px 64px}
h1{margin:0 0 12px;font-size:28px;line-height:1.2;overflow-wrap:anywhere}
h2{margin:40px 0 12px;font-size:18px}
.kind{margin:0;color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.words dt{font-family:ui-monospace,monospace;font-size:13px}
.claims{padding:0;list-style:none;margin:0}
.claims li{background:var(--card);border-left:4px solid #0072b2;border-radius:4px;margin:0 0 8px;padding:10px 14px}
.claims b{display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:5px 10px 5px 0;text-align:right;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line)}
.l{text-align:left}
tr.first td{border-top:10px solid transparent}
tr.dim td{color:var(--soft)}
td.up{color:var(--up);font-weight:600}td.down{color:var(--down)}
details td{white-space:normal;overflow-wrap:anywhere}
.note,figcaption{color:var(--soft);font-size:13px}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:6px;padding:14px}
figure svg{max-width:100%;height:auto;display:block}
figcaption{margin-top:8px;color:#5b6470}
details{margin:0 0 10px}
summary{cursor:pointer;font-weight:600}
code{font-weight:400;color:var(--soft)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border-radius:6px;padding:12px 14px;margin:8px 0;
font:13px/1.6 ui-monospace,SFMono-Regular,Menlo,monospace}
.prompt{color:var(--soft)}
.t-draft{background:var(--draft)}.t-bonus{background:var(--bonus)}.t-correction{background:var(--correction)}
@media print{details{display:block}body{font-size:12px}}
"""

WORDS = {
    "tpot_ratio": "time per token of the baseline over that of the arm, per prompt, geometric mean; above 1 is faster",
    "e2e_ratio": "the same for the whole request, prefill included",
    "predicted": "tokens_per_verify over the cost of drafting k tokens and verifying k + 1 rows, both measured here",
    "tokens_per_verify": "tokens committed per pass of the target model: accepted drafts plus one",
    "draft_acceptance": "accepted drafts over proposed drafts, always with its depth K: it falls as K grows",
    "depth": "mean depth that the policy asked for",
    "loop_share": "share of emitted 8-grams that occurred before in the same output; above 0.3 a row is marked",
    "equal to baseline": "prompts whose greedy tokens equal the baseline's as far as both were made, and the earliest "
    "token at which one leaves",
    "tok/s": "(N - 1) / (time of the last token - time of the first)",
}
