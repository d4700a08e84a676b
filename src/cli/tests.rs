use anyhow::anyhow;

use std::io;

use super::*;

#[test]
fn the_exit_code_separates_input_errors_from_other_errors() {
    let schema = SchemaError::Form { line: 1, reason: "no".into() };
    assert_eq!(exit_code(&anyhow::Error::from(schema).context("model.toml")), 2);
    assert_eq!(exit_code(&InputError(anyhow::anyhow!("no")).into()), 2);
    assert_eq!(exit_code(&io::Error::from(io::ErrorKind::StorageFull).into()), 1);
    assert_eq!(exit_code(&ClosedOutput.into()), 0);
    // Another pipe than standard output.
    assert_eq!(exit_code(&io::Error::from(io::ErrorKind::BrokenPipe).into()), 1);
}

#[test]
fn the_flags_of_every_command_are_consistent() {
    command().debug_assert();
}

#[test]
fn the_readme_lists_every_command() {
    let readme = include_str!("../../README.md");
    let listed: String = readme.lines().filter(|line| line.starts_with("| `")).collect();
    for command in command().get_subcommands() {
        let name = command.get_name();
        assert!(listed.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn an_error_line_repeats_nothing() {
    let open = DatasetError::Open { path: "x".into(), cause: io::ErrorKind::NotFound.into() };
    assert_eq!(error_line(&open), "x: cannot be opened: entity not found");
    let input = InputError(anyhow::Error::from(open).context("--data"));
    assert_eq!(error_line(&input), "--data: x: cannot be opened: entity not found");
    let model = anyhow!("model \"x\": no good version").context("model \"x\"");
    assert_eq!(error_line(model.as_ref()), "model \"x\": no good version");
    let counts = anyhow!("counts: x: missing").context("cache.counts");
    assert_eq!(error_line(counts.as_ref()), "cache.counts: x: missing");
    assert_eq!(error_line(anyhow!("two\nlines").context("file").as_ref()), "file: two; lines");
}

fn usage_error(line: &str) -> String {
    let words = ["flechette"].into_iter().chain(line.split(' '));
    command().try_get_matches_from(words).unwrap_err().to_string()
}

#[test]
fn a_wrong_number_is_refused_with_what_is_accepted() {
    let train = "train --model-config m --format criteo-tsv --data d --models m --name n";
    for (line, words) in [
        (
            "init --dataset criteo --arch dlrm --dim 4 --rows 100k",
            "'100k' for '--rows <N>': expected a whole number from 1 to 281474976710656, digits only",
        ),
        (
            "init --dataset criteo --arch dlrm --rows 1 --dim -4",
            "'-4' for '--dim <D>': expected a whole number from 1 to 4096",
        ),
        (&format!("{train} --lr -1"), "'-1' for '--lr <L>': expected a positive number"),
        (&format!("{train} --lr 0"), "'0' for '--lr <L>': expected a positive number"),
        (&format!("{train} --batch 1k"), "'1k' for '--batch <N>': expected a whole number from 1 to 1048576"),
        (&format!("{train} --max-malformed x"), "expected a whole number from 0, digits only"),
        (
            &format!("{train} --staging 1X"),
            "'1X' for '--staging <BYTES>': expected a number of bytes, plain or",
        ),
    ] {
        let error = usage_error(line);
        assert!(error.starts_with("error: invalid value ") && error.contains(words), "{line}: {error}");
    }
}

#[test]
fn the_flags_of_a_format_are_those_of_every_command_that_reads_data() {
    let format = "--format csv --columns _,a,click --label click --separator |";
    for line in [
        "train --model-config m --data d --models m --name n",
        "verify --model-config m --data d",
        "serve --models m --train n=d",
        "plan --model-config m --data d",
        "score --model m d",
        "load --model m d --seconds 1 --rate 1",
    ] {
        let words = format!("flechette {line} {format}");
        command().try_get_matches_from(words.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"));
        if !line.starts_with("serve") {
            let limited = format!("{words} --max-malformed 0");
            assert!(command().try_get_matches_from(limited.split(' ')).is_ok(), "{line}");
        }
        let error = usage_error(&format!("{line} --format csv --separator ||"));
        assert!(error.contains("'--separator <C>': expected one ASCII character"), "{line}: {error}");
    }
    let error = usage_error("serve --models m --columns a,b");
    assert!(error.contains("--train"), "{error}");
}
