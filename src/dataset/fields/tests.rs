use proptest::prelude::*;

use super::*;

const CSV: Division = Division { delimiter: b',', quotes: true };

#[test]
fn quotes_are_removed() {
    let mut fields = Fields::default();
    let row = fields.split(CSV, br#"a,"b,""c""",,d"#).unwrap();
    assert_eq!(row.fields().collect::<Vec<_>>(), [&b"a"[..], br#"b,"c""#, b"", b"d"]);
    let row = fields.split(Division { delimiter: b'\t', quotes: false }, b"\"a\tb").unwrap();
    assert_eq!(row.fields().collect::<Vec<_>>(), [&b"\"a"[..], b"b"]);
}

#[test]
fn a_quote_that_is_not_closed_is_refused() {
    for line in [&b"a,\"b"[..], b"\"", b"\"a\"\"", b"a\",b"] {
        let reason = Fields::default().split(CSV, line).err();
        assert_eq!(reason.as_deref(), Some("a double quote is not closed in the line"));
    }
}

#[test]
fn text_that_is_not_a_finite_number_is_refused() {
    for text in ["-", "nan", "inf", "-inf", "1e99", "1 ", "0x1", "1-1", "\u{661}"] {
        assert_eq!(number(text.as_bytes()), None, "{text}");
    }
    assert_eq!(number(b""), Some(0.0));
    assert_eq!(number(b"\xff"), None);
    assert!(["1e39", "-1e308", "inf", "-inf", "1e999"].iter().all(|text| is_number(text.as_bytes())));
    assert!(["nan", "one", "0x1", "", "\u{661}"].iter().all(|text| !is_number(text.as_bytes())));
}

#[test]
fn names_in_errors_are_cut_and_their_control_bytes_are_escaped() {
    assert_eq!(listed_name("user id"), "user id");
    assert_eq!(listed_name("a\x1b[31m,b"), r#""a\u{1b}[31m,b""#);
    assert_eq!(shown_name("a\n"), r#""a\n""#);
    let long = "x".repeat(900_000);
    let cut = format!("\"{}\"...", "x".repeat(80));
    assert_eq!([listed_name(&long), shown_name(&long)], [&*cut, &*cut]);
}

proptest! {
    #[test]
    fn integers_are_parsed_as_by_the_standard_library(value in any::<i64>(), cut in 0..63u32) {
        let text = (value >> cut).to_string();
        prop_assert_eq!(number(text.as_bytes()), Some(text.parse::<f32>().unwrap()));
    }
}
