use super::*;
use crate::fuzz::bytes::{Input, mutated};
use crate::fuzz::run;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
    let mut headers = HeaderMap::new();
    pairs.iter().for_each(|(name, text)| _ = headers.append(*name, value(text)));
    headers
}

#[test]
fn a_traceparent_is_read_as_the_specification_says() {
    let parse = |text: &str| TraceParent::parse(text.as_bytes());
    let trace = TraceId(0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
    let parent = TraceParent { trace, span: 0xb7ad_6b71_6920_3331, sampled: true };
    assert_eq!(parse(PARENT), Some(parent));
    assert_eq!(trace.to_string(), PARENT[3..35]);
    let unsampled = TraceParent { sampled: false, ..parent };
    assert_eq!(parse(&PARENT.replace("-01", "-00")), Some(unsampled));
    assert_eq!(parse(&PARENT.replace("-01", "-02")), Some(unsampled));
    assert_eq!(parse(&PARENT.replace("-01", "-ff")), Some(parent));
    // A later version may have more fields, and this one may not.
    let later = PARENT.replacen("00", "cc", 1);
    assert_eq!(parse(&later), Some(parent));
    assert_eq!(parse(&format!("{later}-what-comes")), Some(parent));
    let mut wrong = vec![String::new(), "00".to_owned(), format!("{PARENT}-x"), format!("{later}x")];
    wrong.extend([format!("{PARENT} "), PARENT.to_uppercase(), PARENT.replacen("00", "ff", 1)]);
    wrong.push(PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)));
    wrong.push(PARENT.replace("b7ad6b7169203331", &"0".repeat(16)));
    // Each position of a digit or a dash refuses another character.
    wrong.extend((0..PARENT.len()).map(|at| format!("{}g{}", &PARENT[..at], &PARENT[at + 1..])));
    wrong.extend((0..PARENT.len()).map(|at| PARENT[..at].to_owned()));
    for text in wrong {
        assert_eq!(parse(&text), None, "{text}");
    }
}

#[test]
fn two_traceparents_are_ignored() {
    let twice = Origin::of(&headers(&[("traceparent", PARENT), ("traceparent", PARENT)]));
    assert_eq!(twice.parent, None);
    assert!(Origin::of(&headers(&[("traceparent", PARENT)])).parent.is_some());
}

#[test]
fn the_id_is_that_of_the_request_or_of_its_call_or_of_its_trace() {
    let id = |pairs: &[(&'static str, &str)], own: &str| Origin::of(&headers(pairs)).id(own).into_owned();
    let (of_call, of_trace) = (("x-request-id", "call-1"), ("traceparent", PARENT));
    assert_eq!(id(&[of_call, of_trace], "own-1"), "own-1");
    assert_eq!(id(&[of_call, of_trace], ""), "call-1");
    assert_eq!(id(&[of_trace], ""), PARENT[3..35]);
    assert_eq!(id(&[("traceparent", "wrong")], ""), "");
}

#[test]
fn an_id_cannot_forge_a_line_of_the_log_and_is_bounded() {
    let origin = Origin::default();
    let id = |own: &str| origin.id(own).into_owned();
    assert_eq!(id("a \"quoted\" id's \\ é 漢"), "a \"quoted\" id's \\ é 漢");
    for hostile in ["\n", "\r", "\t", "\u{1b}", "\u{0}", "\u{7f}", "\u{85}", "\u{2028}", "\u{202e}"] {
        let shown = id(&format!("a{hostile}ERROR forged"));
        assert_eq!(shown, format!("a{}ERROR forged", char::REPLACEMENT_CHARACTER), "{hostile:?}");
    }
    assert_eq!(id(&"漢".repeat(10_000)).chars().count(), ID_CHARS);
    let not_utf8 = HeaderValue::from_bytes(b"a\xffb").unwrap();
    assert_eq!(Origin { id: Some(not_utf8), ..Origin::default() }.id(""), "a\u{fffd}b");
}

mod fuzz {
    use super::*;

    #[test]
    fn traceparent() {
        let seeds = [PARENT.to_owned(), format!("{}-more", PARENT.replacen("00", "01", 1))];
        run(mutated(seeds, &["-", "ff", "00"]), |Input(text)| {
            let Some(parent) = TraceParent::parse(&text) else { return false };
            let TraceParent { trace, span, sampled } = parent;
            assert!(trace.0 != 0 && span != 0);
            let flags = hex(&text[53..55]).unwrap();
            let again = format!("00-{trace}-{span:016x}-{flags:02x}");
            assert_eq!(again.as_bytes()[2..], text[2..55]);
            assert_eq!((TraceParent::parse(again.as_bytes()), sampled), (Some(parent), flags & 1 == 1));
            true
        });
    }

    #[test]
    fn an_id() {
        const HOSTILE: &[&str] = &["\n", "\u{1b}[2J", "\u{202e}", "\u{2028}", "漢"];
        run(mutated(["user-1".to_owned(), "x".repeat(200)], HOSTILE), |Input(text)| {
            let Ok(value) = HeaderValue::from_bytes(&text) else { return false };
            let origin = Origin { id: Some(value), ..Origin::default() };
            let own = String::from_utf8_lossy(&text).into_owned();
            for id in [origin.id(""), origin.id(&own)] {
                assert!(id.chars().count() <= ID_CHARS, "{id:?}");
                let forges = |c: char| {
                    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
                };
                assert!(!id.contains(forges), "{id:?}");
            }
            true
        });
    }
}
