use super::*;

fn parsed(text: &'static str) -> Option<Duration> {
    let mut headers = HeaderMap::new();
    headers.insert("grpc-timeout", text.parse().ok()?);
    timeout(&headers)
}

#[test]
fn timeouts_have_the_form_of_the_protocol() {
    assert_eq!(parsed("20m"), Some(Duration::from_millis(20)));
    assert_eq!(parsed("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
    assert_eq!(parsed("1n"), Some(Duration::from_nanos(1)));
    for text in ["", "m", "123456789m", "-1m", "1x", "1", "+1S"] {
        assert_eq!(parsed(text), None, "{text}");
    }
}
