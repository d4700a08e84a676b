//! Every fault of a schema is refused with its line and the reason.

use proptest::prelude::*;

use super::*;
use crate::schema::Architecture;
use crate::schema::preset::{self, ArchKind};
use crate::schema::{DenseFeature, Hash, Loss, Pooling};
use crate::types::Element;

const SMALL: &str = r#"
[architecture]
kind = "dlrm"
bottom = [8]
top = [8]

[[dense]]
name = "age"
transform = { standardize = { mean = 30.0, std = 10.0 } }

[[features]]
name = "site"
table = "site"
hash = { seed = 0, modulus = 100 }

[[features]]
name = "words"
table = "words"
arity = { multi_hot = { max = 5 } }
pooling = "mean"

[[tables]]
name = "site"
rows = 100
dim = 4

[[tables]]
name = "words"
rows = 50
dim = 4
element = "f16"
default = { row = 49 }
"#;

/// The error for [`SMALL`] with `from`, which occurs once, replaced by `to`; and the line of `from`.
fn refusal(from: &str, to: &str) -> (String, usize) {
    assert_eq!(SMALL.matches(from).count(), 1, "{from:?} must occur once in the text");
    let line = 1 + SMALL[..SMALL.find(from).unwrap()].matches('\n').count();
    (Schema::parse(&SMALL.replace(from, to)).unwrap_err().to_string(), line)
}

#[test]
fn a_valid_schema_is_read() {
    let schema = Schema::parse(SMALL).unwrap();
    assert_eq!(schema.features[1].arity, Arity::MultiHot { max: 5 });
    assert_eq!(schema.features[0].hash, Some(Hash { seed: 0, modulus: 100 }));
    assert_eq!(schema.tables[1].default, AbsentDefault::Row(49));
    assert_eq!((schema.tables[0].element, schema.tables[1].element), (Element::F32, Element::F16));
    assert_eq!(schema.input_width(), 1 + 8);
}

#[test]
fn every_fault_is_refused_with_its_line_and_reason() {
    let cases = [
        ("table = \"site\"", "table = \"nowhere\"", "no table is named \"nowhere\""),
        ("name = \"words\"\ntable", "name = \"site\"\ntable", "name of an earlier entry"),
        ("name = \"words\"\nrows", "name = \"site\"\nrows", "name of an earlier entry"),
        ("rows = 100", "rows = 0", "between 1 and 281474976710656, got 0"),
        ("rows = 100", "rows = 281474976710657", "got 281474976710657"),
        (
            "default = { row = 49 }",
            "default = { row = 50 }",
            "row 50 is not in table \"words\", which has 50 rows",
        ),
        (
            "hash = { seed = 0, modulus = 100 }",
            "hash = { modulus = 101 }",
            "the 100 rows of table \"site\", got 101",
        ),
        ("hash = { seed = 0, modulus = 100 }", "hash = { modulus = 0 }", "got 0"),
        ("max = 5", "max = 0", "between 1 and 65536, got 0"),
        ("std = 10.0", "std = 0.0", "finite and above 0, got 0"),
        ("std = 10.0", "std = nan", "got NaN"),
        ("mean = 30.0", "mean = inf", "must be finite, got inf"),
        ("bottom = [8]", "bottom = [8, 0]", "between 1 and 65536, got 0"),
        ("top = [8]", "top = [65537]", "got 65537"),
        ("name = \"age\"", "name = \"a/b\"", "cannot be a file name"),
        ("name = \"age\"", "name = \".age\"", "cannot be a file name"),
        ("name = \"age\"", "name = \"\"", "must have 1 to 128 bytes, got 0"),
        ("pooling = \"mean\"", "pooling = \"most\"", "unknown variant `most`"),
        ("pooling = \"mean\"", "poling = \"mean\"", "unknown field `poling`"),
        ("pooling = \"mean\"", "wide_table = \"site\"", "dlrm has no wide part"),
        (
            "element = \"f16\"",
            "element = \"f8\"",
            "unknown variant `f8`, expected one of `f32`, `f16`, `int8`",
        ),
        ("rows = 100", "rows = ", ""),
        ("rows = 100", "rows = -1", "invalid value"),
    ];
    for (from, to, reason) in cases {
        let (message, line) = refusal(from, to);
        assert!(message.starts_with(&format!("line {line}: ")), "{to:?} on line {line}: {message}");
        assert!(message.contains(reason), "{to:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_missing_key_is_reported_at_its_table() {
    let (message, line) = refusal("name = \"words\"\nrows = 50\n", "rows = 50\n");
    assert!(message.starts_with(&format!("line {}: ", line - 1)), "line {}: {message}", line - 1);
    assert!(message.contains("missing field `name`"), "{message}");
}

#[test]
fn an_invalid_architecture_is_refused() {
    let dims = |schema: &mut Schema| schema.tables[2].dim = 8;
    let refuse = |kind, change: &dyn Fn(&mut Schema), reason: &str| {
        let mut schema = preset::criteo(kind, 4, 100);
        change(&mut schema);
        let in_code = schema.check().unwrap_err().to_string();
        let in_text = Schema::parse(&schema.to_toml()).unwrap_err().to_string();
        assert!(in_code.contains(reason), "{in_code}");
        assert!(in_text.ends_with(&in_code), "{in_text} against {in_code}");
    };
    refuse(ArchKind::Dlrm, &dims, "features[2].table: architecture dlrm needs tables of the same dim");
    refuse(ArchKind::Deepfm, &dims, "architecture deepfm needs tables of the same dim");
    refuse(
        ArchKind::Deepfm,
        &|s| s.features[1].wide_table = None,
        "missing: architecture deepfm needs a wide table",
    );
    refuse(ArchKind::WideDeep, &|s| s.features[1].wide_table = Some("C1".into()), "must have dim 1, got 4");
    refuse(ArchKind::WideDeep, &|s| s.tables[30].rows = 99, "the 99 rows of table \"C5_wide\", got 100");
    refuse(ArchKind::Dcn, &|s| s.features.clear(), "features: at least one is needed");
    let deepless = Architecture::Dcn { cross_layers: 1, deep: vec![] };
    refuse(ArchKind::Dcn, &|s| s.architecture = deepless.clone(), "at least one hidden size");
    let crossless = Architecture::Dcnv2 { cross_layers: 0, rank: None, deep: vec![1] };
    refuse(ArchKind::Dcn, &|s| s.architecture = crossless.clone(), "cross_layers: must be between 1 and 64");
    let rankless = Architecture::Dcnv2 { cross_layers: 1, rank: Some(0), deep: vec![1] };
    refuse(ArchKind::Dcn, &|s| s.architecture = rankless.clone(), "rank: must be between");
    let huge = Architecture::Deepfm { deep: vec![65_536; 2] };
    refuse(ArchKind::Deepfm, &|s| s.architecture = huge.clone(), "dense weights, at most");
    let mixed = |schema: &mut Schema| schema.tables[2].dim = 8;
    let mut dcn = preset::criteo(ArchKind::Dcn, 4, 100);
    mixed(&mut dcn);
    assert_eq!(dcn.check(), Ok(()));
}

#[test]
fn a_model_without_dense_inputs_is_allowed() {
    assert_eq!(preset::avazu(ArchKind::Dlrm, 4, 100).check(), Ok(()));
}

fn transforms() -> impl Strategy<Value = Transform> {
    let floats = (any::<f32>(), any::<f32>());
    let standardize = floats
        .prop_filter("finite", |(mean, std)| mean.is_finite() && std.is_finite() && *std != 0.0)
        .prop_map(|(mean, std)| Transform::Standardize { mean, std: std.abs() });
    prop_oneof![Just(Transform::None), Just(Transform::Log1p), standardize]
}

fn architectures() -> impl Strategy<Value = Architecture> {
    let sizes = || prop::collection::vec(1..200usize, 1..4);
    prop_oneof![
        (sizes(), sizes()).prop_map(|(bottom, top)| Architecture::Dlrm { bottom, top }),
        (1..5usize, sizes()).prop_map(|(cross_layers, deep)| Architecture::Dcn { cross_layers, deep }),
        (1..5usize, prop::option::of(1..9usize), sizes())
            .prop_map(|(cross_layers, rank, deep)| Architecture::Dcnv2 { cross_layers, rank, deep }),
        sizes().prop_map(|deep| Architecture::Deepfm { deep }),
        sizes().prop_map(|deep| Architecture::WideDeep { deep }),
    ]
}

prop_compose! {
    fn schemas()(
        architecture in architectures(),
        dense in prop::collection::vec(transforms(), 0..4),
        inputs in prop::collection::vec(
            (
                1..MAX_ROWS,
                prop::option::of(1..=MAX_IDS),
                any::<bool>(),
                prop::option::of(any::<u64>()),
                0..9u8,
            ),
            1..5,
        ),
        dim in 1..40usize,
    ) -> Schema {
        let wide = matches!(architecture, Architecture::Deepfm { .. } | Architecture::WideDeep { .. });
        let dense = dense.into_iter().enumerate()
            .map(|(i, transform)| DenseFeature { name: format!("d-{i}.x"), transform }).collect();
        let mut schema =
            Schema { architecture, loss: Loss::default(), dense, features: vec![], tables: vec![] };
        for (i, (rows, max, mean, seed, options)) in inputs.into_iter().enumerate() {
            let element = Element::ALL[usize::from(options) / 3];
            let default = match options % 3 {
                0 => AbsentDefault::Zeros,
                1 => AbsentDefault::Error,
                _ => AbsentDefault::Row(rows - 1),
            };
            let lossy_bits = seed.filter(|seed| seed % 3 == 0).map(|seed| seed as u32 % (rows.ilog2() + 1));
            let table = |name: String, dim| TableSchema { name, rows, dim, element, default, lossy_bits };
            schema.tables.push(table(format!("t{i}"), dim));
            if wide {
                schema.tables.push(table(format!("t{i}_w"), 1));
            }
            schema.features.push(Feature {
                name: format!("f{i}"),
                table: format!("t{i}"),
                wide_table: wide.then(|| format!("t{i}_w")),
                arity: max.map_or(Arity::OneHot, |max| Arity::MultiHot { max }),
                pooling: if mean { Pooling::Mean } else { Pooling::Sum },
                hash: seed.map(|seed| Hash { seed, modulus: rows }),
            });
        }
        schema
    }
}

proptest! {
    #[test]
    fn written_text_reads_back_equal(schema in schemas()) {
        prop_assert_eq!(Schema::parse(&schema.to_toml()), Ok(schema));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,200}", cut in 0..SMALL.len()) {
        let _ = Schema::parse(&text);
        let _ = Schema::parse(&SMALL[..cut]);
        let _ = Schema::parse(&format!("{}{text}{}", &SMALL[..cut], &SMALL[cut..]));
    }
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated};
    use crate::fuzz::run;

    const WORDS: &[&str] = &[
        "[[features]]\nname = \"f\"\ntable = \"site\"\n",
        "[[tables]]\nname = \"t\"\nrows = 1\ndim = 4\n",
        "[architecture]\n",
        "kind = \"dcn\"\n",
        "cross_layers = 3\n",
        "deep = [8]\n",
        "lossy_bits = 3\n",
        "element = \"int8\"\n",
        "default = \"error\"\n",
        "wide_table = \"site\"\n",
        "pooling = \"sum\"\n",
        "rows",
        "site",
        "words",
        "[",
        "{",
        "\"",
        "'''",
        "\n",
        "#",
        " = ",
        ".",
        "\u{feff}",
        "\u{e9}",
    ];

    #[test]
    fn schemas() {
        let mut seeds = ArchKind::ALL.map(|kind| preset::avazu(kind, 4, 50).to_toml()).to_vec();
        seeds.extend([SMALL.to_owned(), SMALL.to_owned(), SMALL.to_owned()]);
        run(mutated(seeds, WORDS), |Input(text)| {
            let Ok(text) = String::from_utf8(text) else { return false };
            let schema = match Schema::parse(&text) {
                Ok(schema) => schema,
                Err(SchemaError::Form { line, .. } | SchemaError::Text { line, .. }) => {
                    assert!((1..=1 + text.matches('\n').count()).contains(&line), "line {line}");
                    return false;
                }
                Err(error) => panic!("an error without a line: {error}"),
            };
            assert_eq!(schema.check(), Ok(()));
            assert_eq!(Schema::parse(&schema.to_toml()).as_ref(), Ok(&schema));
            assert!(schema.lookups().len() >= schema.features.len() && schema.input_width() <= MAX_INPUT);
            true
        });
    }
}
