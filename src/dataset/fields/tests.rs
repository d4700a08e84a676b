use proptest::prelude::*;

use super::*;

#[test]
fn quotes_are_removed() {
    let mut ends = Vec::new();
    let bytes = unquote(b',', br#"a,"b,""c""",,d"#, &mut ends);
    let row = Row { bytes: &bytes, ends: &ends };
    let fields: Vec<_> = (0..ends.len()).map(|i| row.field(i)).collect();
    assert_eq!(fields, [&b"a"[..], br#"b,"c""#, b"", b"d"]);
}

#[test]
fn text_that_is_not_a_finite_number_is_refused() {
    for text in ["-", "nan", "inf", "-inf", "1e99", "1 ", "0x1", "1-1", "\u{661}"] {
        assert_eq!(number(text.as_bytes()), None, "{text}");
    }
    assert_eq!(number(b""), Some(0.0));
    assert_eq!(number(b"\xff"), None);
}

proptest! {
    #[test]
    fn integers_are_parsed_as_by_the_standard_library(value in any::<i64>(), cut in 0..63u32) {
        let text = (value >> cut).to_string();
        prop_assert_eq!(number(text.as_bytes()), Some(text.parse::<f32>().unwrap()));
    }
}
