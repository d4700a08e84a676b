//! `flechette init` as a program.

use std::io::Read;
use std::process::{Command, Output, Stdio};

use flechette::schema::Schema;
use flechette::schema::preset::{self, ArchKind, SyntheticShape};
use flechette::types::Element;

fn flechette(arguments: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_flechette");
    Command::new(program).args(arguments.split_whitespace()).output().unwrap()
}

fn init(arguments: &str) -> Schema {
    let output = flechette(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    Schema::parse(std::str::from_utf8(&output.stdout).unwrap()).unwrap()
}

#[test]
fn init_writes_the_schema_of_the_data_set() {
    let criteo = init("init --dataset criteo --arch dlrm --dim 16 --rows 100000");
    assert_eq!(criteo, preset::criteo(ArchKind::Dlrm, 16, 100_000));
    let avazu = init("init --dataset avazu --arch wide_deep --dim 8 --rows 1000");
    assert_eq!(avazu, preset::avazu(ArchKind::WideDeep, 8, 1000));
    let shape = SyntheticShape { tables: 5, rows: 10, dense: 0, multi_hot: Some(3) };
    for element in Element::ALL {
        let stored =
            init(&format!("init --dataset criteo --arch deepfm --dim 16 --rows 10 --element {element}"));
        assert_eq!(stored, preset::criteo(ArchKind::Deepfm, 16, 10).stored_as(element));
    }
    let synthetic =
        init("init --dataset synthetic --tables 5 --multi-hot 3 --dense 0 --arch dcnv2 --dim 8 --rows 10");
    assert_eq!(synthetic, preset::synthetic(ArchKind::Dcnv2, 8, shape));
}

#[test]
fn wrong_flags_are_usage_errors_that_name_the_flag() {
    for (arguments, words) in [
        ("init --dataset criteo --arch dlrm --dim 16", "--rows"),
        ("init --dataset movies --arch dlrm --dim 16 --rows 1", "movies"),
        ("init --dataset criteo --arch mlp --dim 16 --rows 1", "unknown architecture \"mlp\""),
        ("init --dataset criteo --arch dlrm --dim 16 --rows 1 --tables 3", "--tables: only for"),
        ("init --dataset criteo --arch dlrm --dim 4 --rows 9 --element f64", "expected f32, f16 or int8"),
        (
            "init --dataset criteo --arch dlrm --dim 0 --rows 1",
            "'0' for '--dim <D>': expected a whole number from 1 to 4096",
        ),
        (
            "init --dataset criteo --arch dlrm --dim 4 --rows 0",
            "'0' for '--rows <N>': expected a whole number from 1 to",
        ),
        (
            "init --dataset synthetic --tables 0 --arch dlrm --dim 4 --rows 9",
            "expected a whole number from 1 to 10000",
        ),
        (
            "init --dataset synthetic --tables 99999999999 --arch dlrm --dim 4 --rows 9",
            "'99999999999' for '--tables <T>': expected a whole number from 1 to 10000",
        ),
        ("fly", "fly"),
    ] {
        let output = flechette(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        assert!(message.starts_with("error: ") && message.contains(words), "{arguments}: {message}");
        assert!(output.stdout.is_empty(), "{arguments}");
    }
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_flechette"))
        .args("init --dataset synthetic --tables 9000 --arch dcn --dim 4 --rows 9".split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!((child.wait().unwrap().code(), message.as_str()), (Some(0), ""));
}

#[test]
fn lossy_bits_are_divided_by_size_or_evenly() {
    let bits = |flags: &str| -> Vec<Option<u32>> {
        let schema = init(&format!("init --dataset criteo --arch wide_deep --dim 4 --rows 1000 {flags}"));
        schema.tables.iter().map(|t| t.lossy_bits).collect()
    };
    assert_eq!(bits(""), [None; 52]);
    assert_eq!(bits("--lossy-bits 16"), [None; 52], "52 tables of 1,024 keys fit");
    assert_eq!(bits("--lossy-bits 16 --coding fixed_length"), [None; 52]);
    let narrow = bits("--lossy-bits 14");
    assert!(narrow.iter().all(|bits| matches!(bits, Some(8 | 9))), "{narrow:?}");
    assert_eq!(bits("--lossy-bits 14 --coding fixed_length"), [Some(8); 52]);

    let output = flechette("init --dataset criteo --arch dlrm --dim 4 --rows 10 --lossy-bits 4");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("--lossy-bits") && message.contains("5 bits are needed"), "{message}");
}
