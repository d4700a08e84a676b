use proptest::prelude::*;

use super::*;

fn round_trip(element: Element, row: &[f32]) -> Result<Vec<f32>, RowError> {
    let mut bytes = vec![0xaa; element.row_bytes(row.len())];
    element.encode(row, &mut bytes)?;
    let mut out = vec![f32::NAN; row.len()];
    element.decode(&bytes, &mut out);
    Ok(out)
}

#[test]
fn rows_are_whole_words_and_no_longer_than_they_must_be() {
    for dim in 1..300 {
        for (element, exact) in [(Element::F32, 4 * dim), (Element::F16, 2 * dim), (Element::Int8, dim + 8)] {
            let bytes = element.row_bytes(dim);
            assert_eq!(bytes % ROW_ALIGN, 0, "{element}");
            assert!((exact..exact + ROW_ALIGN).contains(&bytes), "{element} of {dim}: {bytes}");
        }
    }
}

#[test]
fn every_f16_decodes_as_in_the_half_crate() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32_const());
        assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#06x}");
    }
}

#[test]
fn every_finite_f16_is_stored_as_itself() {
    let all: Vec<f32> = (0..=u16::MAX).map(f16_to_f32).filter(|x| x.is_finite()).collect();
    assert_eq!(all.len(), 2 * 31 * 1024);
    let back = round_trip(Element::F16, &all).unwrap();
    assert!(back.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn f16_rounds_to_the_nearest_and_ties_to_even() {
    let step = 1.0 / 1024.0;
    let row = [1.0 + 0.5 * step, 1.0 + 1.5 * step, 1.0 + 0.51 * step, 65_519.0, -1e-8, 3e-8];
    let read = [1.0, 1.0 + 2.0 * step, 1.0 + step, 65_504.0, -0.0, 2f32.powi(-24)];
    assert_eq!(round_trip(Element::F16, &row).unwrap(), read);
}

#[test]
fn a_row_that_a_type_cannot_hold_is_refused_with_element_and_value() {
    let refused = |element: Element, row: &[f32]| round_trip(element, row).unwrap_err().to_string();
    for element in Element::ALL {
        let message = refused(element, &[0.0, f32::NAN]);
        assert_eq!(message, "element 1: expected a finite number, got NaN", "{element}");
        let message = refused(element, &[f32::NEG_INFINITY]);
        assert_eq!(message, "element 0: expected a finite number, got -inf", "{element}");
    }
    let message = refused(Element::F16, &[1.0, 2.0, -65_520.0]);
    assert_eq!(message, "element 2: -65520 is larger in magnitude than 65504, the largest f16");
    let message = refused(Element::Int8, &[-3e38, 3e38]);
    assert!(message.contains("too far apart for the f32 scale of int8"), "{message}");
    let vast = round_trip(Element::Int8, &[-1.5e38, 1.5e38]).unwrap();
    assert_eq!(vast[0], -1.5e38);
}

#[test]
fn rows_of_equal_elements_are_stored_as_they_are() {
    for x in [0.0, 1.0, -0.1, f32::MAX, f32::MIN_POSITIVE, -f32::from_bits(1)] {
        assert_eq!(round_trip(Element::Int8, &[x; 5]).unwrap(), [x; 5]);
    }
    // Almost equal: the scale is less than half of the least positive f32 and rounds to 0.
    assert_eq!(round_trip(Element::Int8, &[0.0, f32::from_bits(9)]).unwrap(), [0.0; 2]);
}

#[test]
fn names_are_read_back_and_others_refused() {
    for element in Element::ALL {
        assert_eq!(element.name().parse(), Ok(element));
    }
    assert_eq!(
        "F16".parse::<Element>().unwrap_err().to_string(),
        "unknown element type \"F16\", expected f32, f16 or int8"
    );
}

proptest! {
    #[test]
    fn an_f32_row_keeps_every_bit_and_f16_the_nearest(
        row in prop::collection::vec(-70_000f32..70_000.0, 0..40),
    ) {
        prop_assert_eq!(round_trip(Element::F32, &row).unwrap(), row.clone());
        match round_trip(Element::F16, &row) {
            Ok(read) => {
                for (x, y) in row.iter().zip(read) {
                    prop_assert_eq!(y, f16::from_f32(*x).to_f32());
                    prop_assert!((x - y).abs() <= (x.abs() / 2048.0).max(2f32.powi(-25)));
                }
            }
            Err(RowError::PastF16 { element, got }) => {
                prop_assert!(got == row[element] && got.abs() >= 65_520.0);
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn an_int8_element_is_within_half_a_step_of_what_it_was(
        row in prop::collection::vec(any::<f32>().prop_filter("held", |x| x.abs() < 1e38), 1..40),
    ) {
        let mut bytes = vec![0; Element::Int8.row_bytes(row.len())];
        Element::Int8.encode(&row, &mut bytes).unwrap();
        let (_, [scale, bias]) = int8_parts(&bytes);
        prop_assert_eq!(bias, row.iter().copied().fold(f32::INFINITY, f32::min));
        for (x, y) in row.iter().zip(int8_values(&bytes)) {
            // Half a step, plus the rounding of product, sum and scale.
            let rounding = 4.0 * f64::from(f32::EPSILON) * (255.0 * f64::from(scale) + f64::from(bias.abs()));
            let most = 0.5 * f64::from(scale) + rounding + 255.0 * f64::from(f32::from_bits(1));
            prop_assert!((f64::from(*x) - f64::from(y)).abs() <= most, "{x} read as {y}, scale {scale}");
        }
    }
}
