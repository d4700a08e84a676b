//! Checks the rules for source code on every file, and tests the checks with small sources that break one
//! rule each. Also checks the links of the documentation.

mod links;
mod rules;
mod source;

use rules::Rule;
use source::Source;

fn broken(folder: &str, sources: &[Source], rules: &[Rule]) -> Vec<String> {
    let mut lines = Vec::new();
    for source in sources {
        for (line, what) in rules.iter().flat_map(|rule| rule(source)) {
            lines.push(format!("{folder}/{}:{line}: {what}", source.path));
        }
    }
    lines
}

#[test]
fn every_source_keeps_the_house_rules() {
    let sources = Source::all("src");
    assert!(sources.iter().any(|source| source.path == "lib.rs"), "src/ was not read");
    let mut lines = broken("src", &sources, rules::SRC_RULES);
    lines.extend(rules::unused_permissions(&sources));
    for folder in ["tests", "benches"] {
        lines.extend(broken(folder, &Source::all(folder), rules::OTHER_RULES));
    }
    assert!(lines.is_empty(), "{} violations:\n{}", lines.len(), lines.join("\n"));
}

/// Asserts that each source breaks the rule once, on its last line, with a message that contains the given
/// words.
fn assert_caught(rule: Rule, path: &str, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        let found = rule(&Source::new(path, text));
        assert_eq!(found.len(), 1, "{path}: {text:?} gave {found:?}");
        assert!(found[0].1.contains(expected), "{path}: {text:?} gave {found:?}");
        assert_eq!(found[0].0, text.lines().count(), "the line of {text:?}");
    }
}

fn assert_passes(rule: Rule, path: &str, cases: &[&str]) {
    for text in cases {
        assert_eq!(rule(&Source::new(path, text)), [], "{path}: {text:?}");
    }
}

#[test]
fn a_wrong_import_is_caught_in_every_form() {
    let cases = [
        ("use crate::store::Table;", "cache may not import store::Table"),
        ("\nuse crate::{types::Version, store};", "cache may not import store"),
        ("use crate::{\n    device::{self, pool},\n    store::{table::Rows}};", "store::table::Rows"),
        ("use crate::store as rows;", "cache may not import store"),
        ("pub(crate) use crate::engine::*;", "engine::*"),
        ("fn f() { crate::store::open(); }", "store::open"),
        ("fn f(t: &crate::trainer::Plan) {}", "trainer::Plan"),
        ("use super::super::store::Table;", "store::Table"),
        ("#[cfg(not(test))]\nuse crate::store::Table;", "store::Table"),
        ("#[cfg(test)]\nmod tests { use crate::engine::Engine; }\nuse crate::store::Table;", "store::Table"),
        ("const S: &str = \"}{\"; // crate::engine::x\nuse crate::store::Table;", "store::Table"),
        ("const C: char = '\"'; fn f<'a>() {}\nuse crate::store::Table;", "store::Table"),
        ("const S: &str = r#\"a \" b\"#;\nuse crate::store::Table;", "store::Table"),
        ("fn f() { assert!(g(crate::store::open())); }", "store::open"),
    ];
    assert_caught(rules::imports, "cache/index.rs", &cases);
    assert_caught(rules::imports, "engine.rs", &[("use super::batcher::submit;", "batcher::submit")]);
    assert_caught(rules::imports, "planner/trace.rs", &[("use crate::cache::pool::Slab;", "cache::pool")]);
    assert_caught(rules::imports, "trainer/plan.rs", &[("use crate::planner::report;", "planner::report")]);
    assert_caught(rules::imports, "odds.rs", &[("fn f() {}", "odds has no row")]);
}

#[test]
fn an_import_that_the_table_allows_passes() {
    let cases = [
        "use crate::device::pool::Pool;",
        "use crate::{cache::key, types::{FlatKey, Version}};",
        "use super::key::Key; use super::super::cache::pool;",
        "// crate::store::Table\n/* use crate::store; */ const S: &str = \"crate::store::Table\";",
        "#[cfg(test)]\nmod tests {\n    use crate::store::Table;\n    fn f() { crate::engine::run() }\n}",
        "#[cfg(all(test, flechette_loom))]\nuse crate::store::{Table, Row};\nuse crate::sync::Arc;",
        "use std::sync::Arc; fn f() { serde_json::to_string(&1) }",
    ];
    assert_passes(rules::imports, "cache/index.rs", &cases);
    assert_passes(rules::imports, "planner/trace.rs", &["use crate::cache::{policy};"]);
    assert_passes(rules::imports, "cli/train.rs", &["use crate::{trainer, engine, server::ctr};"]);
    assert_passes(rules::imports, "main.rs", &["use flechette::cli;"]);
}

#[test]
fn the_import_table_has_no_cycle_but_through_narrow_paths() {
    for (module, allowed) in rules::IMPORTS {
        for other in allowed.iter().filter(|other| !other.contains("::") && *other != module) {
            let back = rules::IMPORTS.iter().find(|(name, _)| name == other);
            let returns = back.is_some_and(|(_, allowed)| allowed.contains(module));
            assert!(!returns, "{module} and {other} import each other");
        }
    }
}

#[test]
fn a_permission_that_no_file_uses_is_caught() {
    let unused = |text| rules::unused_permissions(&[Source::new("store/format.rs", text)]);
    let is_unused = |text, path: &str| unused(text).contains(&format!("store does not use {path}"));
    assert!(!is_unused("use crate::types::{Version, TableId};", "types"));
    assert!(is_unused("use crate::mem::huge;", "types"));
    assert!(is_unused("#[cfg(test)] use crate::types::Version;", "types"), "a test needs no permission");
}

#[test]
fn a_long_file_and_a_long_line_are_caught() {
    let lines = |n: usize| format!("//! Docs.\n{}", "\n".repeat(n - 1));
    assert_passes(rules::short_files, "engine.rs", &[&lines(600)]);
    assert_caught(rules::short_files, "engine.rs", &[(&lines(601), "601 lines, limit 600")]);
    let line = |n: usize| format!("//! {}", "\u{e9}".repeat(n - 4));
    assert_passes(rules::short_lines, "engine.rs", &[&line(110)]);
    assert_caught(rules::short_lines, "engine.rs", &[(&line(111), "111 columns, limit 110")]);
}

#[test]
fn a_crate_outside_its_home_is_caught() {
    let cases = [
        ("use tonic::Status;", "tonic belongs in server/, cli/"),
        ("fn f() -> cudarc::driver::CudaSlice<f32> {}", "cudarc belongs in device/cuda/"),
        ("use subtle;", "subtle belongs in server/security/"),
        ("use std::fmt;\nuse prost::{Message as _};", "prost belongs in"),
    ];
    assert_caught(rules::crate_homes, "device/host.rs", &cases);
    assert_passes(rules::crate_homes, "server/ctr.rs", &["use tonic::Status; use prost::Message;"]);
    assert_passes(rules::crate_homes, "device/cuda/context.rs", &["use cudarc::driver::sys;"]);
    assert_passes(rules::crate_homes, "engine.rs", &["fn f(tonic: u8) {} // tonic::Status"]);
}

#[test]
fn unsafe_outside_its_homes_is_caught_in_tests_too() {
    let cases = [
        ("fn f() { unsafe { g() } }", "unsafe belongs in"),
        ("#![allow(unsafe_code)]", "unsafe_code belongs in"),
        ("#[cfg(test)]\nmod tests { unsafe fn f() {} }", "unsafe belongs in"),
    ];
    assert_caught(rules::unsafe_homes, "cache/policy.rs", &cases);
    assert_passes(rules::unsafe_homes, "cache/pool.rs", &["// SAFETY: x\nunsafe impl Send for Slab {}"]);
    assert_passes(rules::unsafe_homes, "engine.rs", &["// unsafe\nconst S: &str = \"unsafe\";"]);
}

#[test]
fn an_unsafe_block_without_a_safety_comment_is_caught() {
    let cases = [
        ("fn f() {\n    unsafe { g() } }", "without a SAFETY comment"),
        ("// Fast.\nunsafe impl Send for Slab {}", "without a SAFETY comment"),
        (
            "fn f() {\n// SAFETY: of a.\nlet a = unsafe { g() };\nlet b = unsafe { g() }; }",
            "without a SAFETY",
        ),
        ("fn f() {\n// SAFETY: too far away.\n\nlet a = unsafe { g() }; }", "without a SAFETY comment"),
    ];
    assert_caught(rules::safety_comments, "device/host.rs", &cases);
    let good = [
        "fn f() {\n// SAFETY: in bounds.\nlet a = unsafe { g() }; }",
        "fn f() {\n// SAFETY: in bounds, because\n// of the line above.\nlet a =\n    unsafe { g() }; }",
        "fn f() { let a = unsafe { g() }; } // SAFETY: in bounds.",
        "/// Docs.\nunsafe fn f() {}\nunsafe extern \"C\" { fn g(); }",
    ];
    assert_passes(rules::safety_comments, "device/host.rs", &good);
}

#[test]
fn reading_the_environment_outside_config_is_caught() {
    let cases = [
        ("fn f() { std::env::var(\"A\"); }", "belongs in config/mod.rs"),
        ("use std::env;\nfn f() { env::vars_os() }", "env::vars_os belongs in config/mod.rs"),
        ("use std::{env::{self, var}, fs};", "std::env::var belongs in config/mod.rs"),
        ("fn f() { EnvFilter::from_default_env() }", "from_default_env belongs in config/mod.rs"),
        ("fn f() { EnvFilter::builder().from_env_lossy() }", "from_env_lossy belongs in config/mod.rs"),
    ];
    assert_caught(rules::env_reads, "cli/serve.rs", &cases);
    assert_passes(rules::env_reads, "config/mod.rs", &["fn f() { std::env::var(\"A\"); }"]);
    let good = ["fn f() { env!(\"CARGO_PKG_VERSION\"); std::env::args_os(); std::env::temp_dir(); }"];
    assert_passes(rules::env_reads, "cli/serve.rs", &good);
}

#[test]
fn an_unwrap_without_a_proof_is_caught() {
    let cases = [
        ("fn f() {\n    x.unwrap(); }", "unwrap without a comment"),
        ("fn f() {\n    let s = \"// a string\"; x.unwrap(); }", "unwrap without a comment"),
        ("fn f() {\n    assert!(x.unwrap()); }", "unwrap without a comment"),
        ("fn f() {\n    x\n        .expect(\"is there\"); }", "expect without a comment"),
    ];
    assert_caught(rules::proofs, "engine.rs", &cases);
    let good = [
        "fn f() {\n    // Never empty: `new` pushed one.\n    x.last().unwrap();\n}",
        "fn f() { x.unwrap(); } // never empty",
        "fn f() { x.unwrap_or(1); y.unwrap_or_else(g); }",
        "#[test]\nfn f() { x.unwrap(); }",
        "#[cfg(test)]\nmod tests { fn f() { x.unwrap(); } }",
    ];
    assert_passes(rules::proofs, "engine.rs", &good);
}

#[test]
fn a_file_is_test_code_only_if_its_parent_declares_it_for_tests() {
    let parent =
        "#[cfg(test)]\n#[allow(dead_code)]\nmod crash;\n#[cfg(test)]\nmod inline { mod here; }\nmod disk;";
    let text = "fn f() { x.unwrap(); }";
    let files = [
        ("store/mod.rs", parent),
        ("store/crash.rs", text),
        ("store/crash/disk.rs", text),
        ("store/disk.rs", text),
        ("store/crashed.rs", text),
        ("crash.rs", text),
    ];
    let mut sources = files.map(|(path, text)| Source::new(path, text));
    Source::leave_out_test_files(&mut sources);
    let caught: Vec<&str> =
        sources.iter().filter(|s| !rules::proofs(s).is_empty()).map(|s| s.path.as_str()).collect();
    assert_eq!(caught, ["store/disk.rs", "store/crashed.rs", "crash.rs"]);
}

#[test]
fn missing_docs_marks_of_unfinished_work_and_empty_names_are_caught() {
    for text in ["", "use std::fmt;", "// A comment.", "//!"] {
        assert_eq!(rules::module_docs(&Source::new("engine.rs", text)).len(), 1, "{text:?}");
    }
    assert_passes(rules::module_docs, "engine.rs", &["//! The engine.\n", "\n//! The engine."]);

    let cases = [
        ("fn f() { todo!() }", "todo!"),
        ("fn f() { unimplemented!(\"later\") }", "unimplemented!"),
        ("#[test]\n#[ignore] fn f() {}", "ignore"),
        ("#[ignore = \"slow\"] fn f() {}", "ignore"),
    ];
    assert_caught(rules::unfinished, "engine.rs", &cases);
    assert_passes(rules::unfinished, "engine.rs", &["// todo!()\nfn todo() { let ignore = 1; }"]);

    let cases = [
        ("struct CacheManager;", "CacheManager"),
        ("mod utils;", "utils"),
        ("fn helper() {}", "helper"),
        ("fn\nparse_helpers() {}", "parse_helpers"),
    ];
    assert_caught(rules::names, "engine.rs", &cases);
    assert_caught(rules::names, "cache/utils.rs", &[("fn f() {}", "utils")]);
    assert_passes(
        rules::names,
        "engine.rs",
        &["use subtle::ConstantTimeEq; fn utilise() {} struct Manages;"],
    );
}
