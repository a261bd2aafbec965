//! What our HTML pages have in common: one style, light and dark, and nothing from elsewhere.

use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1a1a1a;--paper:#fff;--faint:#8884;--mark:#2563eb;--soft:#2563eb55;--warm:#d9480f}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--paper:#161616;--mark:#7aa2ff;--soft:#7aa2ff44;--warm:#ff9a5c}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:780px;margin:2em auto;padding:0 1em}\
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.15em;margin:2em 0 .3em}p{margin:.3em 0;overflow-wrap:anywhere}\
svg{width:100%;height:auto}svg text{fill:var(--ink);font-size:12px}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.15em .7em;text-align:right;border-bottom:1px solid var(--faint)}\
th:first-child,td:first-child{text-align:left}.scroll{overflow-x:auto}small{opacity:.75}";

/// What comes after the last part of a page.
pub const END: &str = "</body></html>\n";

/// A page up to its heading, `title`, and a line `about` it; both are text, not HTML.
pub fn begin(title: &str, about: &str) -> String {
    let (title, about) = (escape(title), escape(about));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n\
         <p><small>{about}</small></p>\n"
    )
}

/// Text that is safe between tags and within quotes.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A table; headings and cells are text, not HTML.
pub fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = String::from("<div class=\"scroll\"><table><tr>");
    for heading in headings {
        let _ = write!(table, "<th>{}</th>", escape(heading));
    }
    table.push_str("</tr>\n");
    for row in rows {
        table.push_str("<tr>");
        for cell in row {
            let _ = write!(table, "<td>{}</td>", escape(&cell));
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table></div>\n");
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out() {
        let evil = "<script>\"&";
        assert_eq!(escape(evil), "&lt;script&gt;&quot;&amp;");
        let page = begin(evil, evil) + &table(&[evil], [vec![evil.to_owned()]]) + END;
        assert!(!page.contains("<script>"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 5);
    }
}
