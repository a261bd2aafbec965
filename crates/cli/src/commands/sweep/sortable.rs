//! The table of all points, which sorts by the heading that is clicked.

use std::fmt::Write;

use powerinfer_artifact::{
    ByteSize,
    page::{escape, table},
};

use super::{
    report::{speed, told_hot, told_pass, told_rise, told_speed},
    rows::{Functions, Row},
};
use crate::output::percent;

/// Sorts the table by the column whose heading is clicked; once more turns it round.
pub(super) const SORTING: &str = "<script>\
for(const table of document.querySelectorAll('table.sortable')){const heads=[...table.tHead.rows[0].cells];\
heads.forEach((head,column)=>head.querySelector('button').addEventListener('click',()=>{\
const down=head.getAttribute('aria-sort')==='ascending';heads.forEach(other=>other.removeAttribute('aria-sort'));\
head.setAttribute('aria-sort',down?'descending':'ascending');\
const key=row=>{const cell=row.cells[column],value=cell.dataset.value;return value===undefined?cell.textContent:value===''?-Infinity:Number(value)};\
const body=table.tBodies[0];[...body.rows].sort((a,b)=>{const[x,y]=[key(a),key(b)];return(x<y?-1:x>y?1:0)*(down?-1:1)}).forEach(row=>body.append(row))}))}\
</script>\n";

/// A column of the table: its heading, what it says, and the figure it sorts by; without one it sorts by its text.
type Column = (
    &'static str,
    fn(&Row) -> String,
    Option<fn(&Row) -> Option<f64>>,
);

const COLUMNS: [Column; 19] = [
    ("level", |row| row.axes.level.clone(), None),
    (
        "hot",
        told_hot,
        Some(|row| {
            let budget = row.axes.vram_bytes.map(|bytes| bytes as f64);
            budget.or(row.axes.hot_threshold)
        }),
    ),
    (
        "batch",
        |row| row.axes.batch.to_string(),
        Some(|row| Some(row.axes.batch as f64)),
    ),
    (
        "context",
        |row| row.axes.context_tokens.to_string(),
        Some(|row| Some(row.axes.context_tokens as f64)),
    ),
    (
        "hot neurons",
        |row| share(row.placement.as_ref().map(|one| one.neuron_share)),
        Some(|row| row.placement.as_ref().map(|one| one.neuron_share)),
    ),
    (
        "carry",
        |row| share(row.placement.as_ref().map(|one| one.activation_share)),
        Some(|row| row.placement.as_ref().map(|one| one.activation_share)),
    ),
    (
        "on GPU",
        |row| {
            row.placement
                .as_ref()
                .map_or_else(|| "–".to_owned(), |one| ByteSize(one.gpu_bytes).to_string())
        },
        Some(|row| row.placement.as_ref().map(|one| one.gpu_bytes as f64)),
    ),
    (
        "silent",
        |row| percent(row.sparsity.true_share),
        Some(|row| Some(row.sparsity.true_share)),
    ),
    (
        "computed",
        |row| percent(row.sparsity.computed_share),
        Some(|row| Some(row.sparsity.computed_share)),
    ),
    (
        "recall",
        |row| share(row.predictor.as_ref().map(|one| one.count_recall)),
        Some(|row| row.predictor.as_ref().map(|one| one.count_recall)),
    ),
    (
        "tok/s simulated",
        |row| {
            row.speed
                .planned
                .as_ref()
                .map_or_else(|| "–".to_owned(), |one| speed(one.tokens_per_second))
        },
        Some(|row| row.speed.planned.as_ref().map(|one| one.tokens_per_second)),
    ),
    (
        "tok/s measured",
        |row| told_speed(&row.speed.measured),
        Some(|row| {
            let measured = &row.speed.measured;
            (!measured.emulated).then_some(measured.tokens_per_second.median)
        }),
    ),
    (
        "first token ms",
        |row| format!("{:.1}", row.speed.measured.first_token_milliseconds.median),
        Some(|row| Some(row.speed.measured.first_token_milliseconds.median)),
    ),
    (
        "P95 µs",
        |row| format!("{:.0}", row.speed.measured.decode_microseconds.p95),
        Some(|row| Some(row.speed.measured.decode_microseconds.p95)),
    ),
    (
        "P99 µs",
        |row| format!("{:.0}", row.speed.measured.decode_microseconds.p99),
        Some(|row| Some(row.speed.measured.decode_microseconds.p99)),
    ),
    (
        "KB a token",
        |row| format!("{:.0}", row.speed.measured.bytes_per_token / 1e3),
        Some(|row| Some(row.speed.measured.bytes_per_token)),
    ),
    (
        "perplexity",
        |row| told_rise(row.quality.perplexity_rise),
        Some(|row| Some(row.quality.perplexity_rise.value)),
    ),
    (
        "pass@1 tasks",
        |row| pass(row, "held-out tasks"),
        Some(|row| pass_value(row, "held-out tasks")),
    ),
    (
        "pass@1 HumanEval",
        |row| pass(row, "HumanEval"),
        Some(|row| pass_value(row, "HumanEval")),
    ),
];

/// The functions of one kind, where such were written.
fn functions<'a>(row: &'a Row, kind: &str) -> Option<&'a Functions> {
    row.quality.functions.iter().find(|one| one.name == kind)
}

fn pass(row: &Row, kind: &str) -> String {
    functions(row, kind).map_or_else(|| "–".to_owned(), told_pass)
}

fn pass_value(row: &Row, kind: &str) -> Option<f64> {
    Some(functions(row, kind)?.pass_at_1?.value)
}

fn share(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), percent)
}

/// Every row.
pub(super) fn figures(page: &mut String, rows: &[Row]) {
    page.push_str(
        "<h2>All points</h2><p><small>A heading sorts by its column. More figures are in the CSV and the JSON beside this page.</small></p>\n\
         <div class=\"scroll\"><table class=\"sortable\"><thead><tr>",
    );
    for (heading, ..) in COLUMNS {
        let _ = write!(page, "<th><button>{}</button></th>", escape(heading));
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        page.push_str("<tr>");
        for (_, cell, key) in COLUMNS {
            let value = match key {
                None => String::new(),
                Some(key) => {
                    let value = key(row).map_or_else(String::new, |value| value.to_string());
                    format!(" data-value=\"{value}\"")
                }
            };
            let _ = write!(page, "<td{value}>{}</td>", escape(&cell(row)));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
    let troubles = rows
        .iter()
        .filter_map(|row| Some((row, row.trouble.as_ref()?)));
    let troubles: Vec<Vec<String>> = troubles
        .map(|(row, trouble)| vec![row.axes.level.clone(), told_hot(row), trouble.clone()])
        .collect();
    if !troubles.is_empty() {
        *page += &table(&["level", "hot", "not placed, because"], troubles);
    }
}
