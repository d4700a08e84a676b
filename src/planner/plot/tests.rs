use super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn every_plot_is_a_closed_document_with_finite_numbers_inside_its_area(
        wanted in accesses(100), fractions in prop::collection::vec(0.0f64..=1.0, 1..5),
    ) {
        let trace = trace(&wanted);
        let plan = Plan::of(&trace, &fractions, 0);
        let svg = svg(&plan);
        prop_assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        prop_assert_eq!(svg.matches("<polyline").count(), Policy::ALL.len() + 2);
        for word in svg.split(['"', ' ', ',']).filter(|word| word.contains('.')) {
            if let Ok(number) = word.parse::<f64>() {
                prop_assert!((0.0..=WIDTH).contains(&number), "{number}");
            }
        }
    }
}
