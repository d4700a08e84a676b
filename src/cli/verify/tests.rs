use super::*;
use serde_json::{Value, json};

fn report(difference: Option<Difference>) -> (Value, anyhow::Result<()>) {
    let stats =
        PlanStats { hits: 1, fills: 2, evictions: 3, bubbles: 4, splits: 5, shrinks: 6, filled_before: 7 };
    let verified = Verified { steps: 8, stats, slots: 9, difference };
    (verified.json(), verified.result().map_err(Into::into))
}

#[test]
fn a_difference_is_reported_with_table_row_and_step_and_is_not_an_input_error() {
    let (json, result) = report(Some(Difference { table: Some("ads".into()), row: 12, step: 3 }));
    assert_eq!(json["equal"], false);
    assert_eq!(json["first_difference"], json!({ "table": "ads", "row": 12, "step": 3 }));
    let error = result.unwrap_err();
    assert_eq!(error.to_string(), "trained bytes differ: table \"ads\", row 12, step 3");
    assert_eq!(crate::cli::exit_code(&error), 1);
    let (json, result) = report(Some(Difference { table: None, row: 2, step: 1 }));
    assert_eq!(json["first_difference"], json!({ "table": null, "row": 2, "step": 1 }));
    assert_eq!(result.unwrap_err().to_string(), "trained bytes differ: dense weight 2, step 1");
}

#[test]
fn equal_bytes_are_reported_with_all_counts() {
    let (json, result) = report(None);
    let expected = json!({ "equal": true, "first_difference": null, "steps": 8, "hits": 1, "fills": 2,
        "evictions": 3, "bubbles": 4, "splits": 5, "shrinks": 6, "slots": 9 });
    assert_eq!((json, result.is_ok()), (expected, true));
}
