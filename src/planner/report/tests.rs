use super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn json_has_every_size_policy_and_optimum(
        wanted in accesses(200), fractions in prop::collection::vec(0.0f64..=1.0, 1..4),
    ) {
        let trace = trace(&wanted);
        let plan = Plan::of(&trace, &fractions, 0);
        let json = plan.json(None);
        prop_assert_eq!(json["accesses"].as_u64(), Some(wanted.len() as u64));
        prop_assert_eq!(json["ids"].as_u64(), Some(trace.rows.len() as u64));
        prop_assert_eq!(json["sizes"].as_array().unwrap().len(), fractions.len());
        for (size, &fraction) in json["sizes"].as_array().unwrap().iter().zip(&fractions) {
            prop_assert_eq!(size["fraction"].as_f64(), Some(fraction));
            let rows = (fraction * trace.rows.len() as f64).floor() as u64;
            prop_assert_eq!(size["rows"].as_u64(), Some(rows));
            let optimal = size["optimal"].as_f64().unwrap();
            for policy in SimulatedPolicy::ALL {
                let rate = |kind: &str| size[kind][policy.name()].as_f64().unwrap();
                let refuses = policy == SimulatedPolicy::ServerDefault;
                let per_table = size["per_table"]["optimal"].as_f64().unwrap();
                let best = if refuses { [1.0, 1.0] } else { [optimal, per_table] };
                prop_assert!((0.0..=best[0] + 1e-12).contains(&rate("flat")));
                prop_assert!((0.0..=best[1] + 1e-12).contains(&rate("per_table")));
            }
        }
    }

    #[test]
    fn text_names_every_size_and_table(wanted in accesses(100)) {
        let trace = trace(&wanted);
        let plan = Plan::of(&trace, &[0.25, 1.0], 0);
        let text = plan.text(None) + &plan.tables_text();
        for word in ["by table at 25 % of the rows", "by table at 100 % of the rows", "stops paying at"] {
            prop_assert!(text.contains(word), "{word} in\n{text}");
        }
        for table in &trace.tables {
            prop_assert_eq!(text.lines().filter(|l| l.starts_with(&format!("{} ", table.name))).count(), 2);
        }
    }
}

#[test]
fn only_the_most_used_tables_have_their_own_line() {
    use crate::planner::trace::TraceBuilder;
    use crate::schema::preset::{self, ArchKind, SyntheticShape};
    use crate::types::TableId;
    let shape = SyntheticShape { tables: 100, rows: 10, dense: 0, multi_hot: None };
    let mut builder = TraceBuilder::new(&preset::synthetic(ArchKind::Dcn, 4, shape));
    for table in 0..100u32 {
        (0..=table).for_each(|_| builder.push(TableId(table), 3).unwrap());
    }
    let trace = builder.finish(0.5);
    let plan = Plan::of(&trace, &[1.0], 0);
    let text = plan.text(None) + &plan.tables_text();
    // Tables 0 to 59 have 1 to 60 accesses of one row. The first access of each table misses.
    let line = text.lines().find(|line| line.starts_with("60 others")).unwrap();
    let cells: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(cells[2..], ["60", "1830", "60", "96.7", "96.7", "96.7", "96.7"], "{line}");
    assert!(text.contains("a sample of 50 % of the rows"), "{text}");
}
