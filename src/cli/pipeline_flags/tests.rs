use super::*;

#[test]
fn a_size_is_min_a_fraction_or_bytes() {
    let parsed = |text: &str| text.parse::<SizeFlag>();
    assert_eq!(parsed("min"), Ok(SizeFlag::Min));
    assert_eq!(parsed("0.02"), Ok(SizeFlag::Fraction(0.02)));
    assert_eq!(parsed("1"), Ok(SizeFlag::Fraction(1.0)));
    assert_eq!(parsed("1.0"), Ok(SizeFlag::Fraction(1.0)));
    assert_eq!(parsed("4096"), Ok(SizeFlag::Bytes(4096)));
    assert_eq!(parsed("2Gi"), Ok(SizeFlag::Bytes(2 << 30)));
    for refused in ["0", "-1", "1.5", "max", "", "nan", "0.0"] {
        assert!(parsed(refused).unwrap_err().starts_with("expected min, a fraction"), "{refused}");
    }
}
