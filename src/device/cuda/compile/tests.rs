use super::*;

#[test]
fn a_known_device_gets_machine_code_a_newer_one_ptx_and_an_older_one_nothing() {
    let known = [75, 80, 86, 90];
    assert_eq!(Target::best(Compute::from_number(90), &known), Some(Target::Binary(90)));
    assert_eq!(Target::best(Compute::from_number(89), &known), Some(Target::Text(86)));
    assert_eq!(Target::best(Compute::from_number(120), &known), Some(Target::Text(90)));
    assert_eq!(Target::best(Compute::from_number(70), &known), None);
    assert_eq!(Target::Binary(90).to_string(), "sm_90");
    assert_eq!(Target::Text(90).to_string(), "compute_90");
}
