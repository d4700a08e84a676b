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
        let svg = svg(&plan).unwrap();
        prop_assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        for series in series(&plan) {
            prop_assert!(svg.contains(&series.name), "no legend for {}", series.name);
        }
        for list in svg.split("points=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            for number in list.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok()) {
                prop_assert!((0.0..=f64::from(SIZE.0)).contains(&number), "{number}");
            }
        }
    }
}
