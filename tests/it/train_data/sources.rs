//! Where samples come from: followed directories and standard input are trained as files are, and wrong flags
//! are named.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use super::workshop::{contents, parts, workshop};
use crate::program::{Workshop, flechette, run, run_failing, run_json};

#[test]
fn a_followed_directory_trains_the_bytes_of_one_run_over_its_files() {
    let (workshop, line) = workshop(1000);
    let dir = workshop.path("parts");
    let parts = parts(&workshop, &dir);
    let follow = format!("{line} --name follow --follow {dir} --follow-until 09");
    let mut child = flechette().args(follow.split_whitespace()).stderr(Stdio::piped()).spawn().unwrap();
    let reader = BufReader::new(child.stderr.take().unwrap());
    let mut lines = reader.lines().map(Result::unwrap);
    let mut report = String::new();
    for (n, (path, text)) in parts.iter().enumerate() {
        fs::write(format!("{path}.tmp"), text).unwrap();
        fs::rename(format!("{path}.tmp"), path).unwrap();
        if n == 4 {
            // Once a later file was trained, a file with a lower name is late.
            let trained = |line: &String| line.starts_with("02: 100 samples, before training on them: AUC ");
            let seen: Vec<String> = lines.by_ref().take_while(|line| !trained(line)).collect();
            report += &seen.join("\n");
            fs::write(format!("{dir}/001"), text).unwrap();
        }
    }
    report += &lines.collect::<Vec<_>>().join("\n");
    assert!(child.wait().unwrap().success(), "{report}");
    assert_eq!(report.matches("001: appeared after").count(), 1, "{report}");
    for n in [0, 1, 3, 4, 5, 9] {
        assert!(report.contains(&format!("0{n}: 100 samples, before training on them: AUC ")), "{report}");
    }
    let files: Vec<&str> = parts.iter().map(|(path, _)| path.as_str()).collect();
    run_json(&format!("{line} --name list --data {}", files.join(" ")));
    run_json(&format!("{line} --name whole --data {}", workshop.train));
    assert_eq!(contents(&workshop, "follow", 1), contents(&workshop, "list", 1));
    assert_eq!(contents(&workshop, "follow", 1), contents(&workshop, "whole", 1));
}

#[test]
fn standard_input_is_trained_as_a_file_is() {
    let (workshop, line) = workshop(500);
    let text = fs::read(&workshop.train).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    run_json(&format!("{line} --name file --data {}", workshop.train));
    for (name, text) in [("plain", text), ("gzip", gzip.finish().unwrap())] {
        let mut child = flechette()
            .args(format!("{line} --name {name} --data -").split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&text).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(contents(&workshop, name, 1), contents(&workshop, "file", 1));
    }
}

#[test]
fn the_scores_of_a_file_with_malformed_lines_stay_in_its_lines() {
    let (workshop, line) = workshop(100);
    let (train, valid, out) = (&workshop.train, workshop.path("spoiled"), workshop.path("scores"));
    let good = fs::read_to_string(&workshop.valid).unwrap();
    let scores = |valid: &str, name: &str| {
        run_json(&format!("{line} --name {name} --data {train} --valid {valid} --valid-out {out}"));
        let text = fs::read_to_string(&out).unwrap();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = scores(&workshop.valid, "good");
    // At the beginning, in the middle and at the end.
    let mut lines: Vec<&str> = good.lines().collect();
    let bad = [0, 70, 71, 203];
    bad.iter().for_each(|&at| lines.insert(at, "not a sample"));
    fs::write(&valid, lines.join("\n")).unwrap();
    let spoiled = scores(&valid, "spoiled");
    assert_eq!(spoiled.len(), lines.len());
    let is_nan: Vec<usize> = (0..spoiled.len()).filter(|&at| spoiled[at] == "nan").collect();
    assert_eq!(is_nan, bad);
    assert!(spoiled.iter().filter(|score| *score != "nan").eq(&expected));
}

#[test]
fn flags_of_the_data_that_cannot_be_used_are_refused_by_name() {
    let (workshop, line) = workshop(10);
    let Workshop { train, valid, .. } = &workshop;
    let file = format!("{line} --name m --data {train}");
    for (more, words) in [
        ("--early-stop 1", "--valid"),
        ("--save-best", "--valid"),
        ("--valid-ratio 1", "expected a number above 0 and below 1"),
        ("--shuffle 1", "expected a whole number from 2"),
        ("--follow-until x", "--follow"),
        ("--lr-decay cubic --lr-decay-steps 1", "expected linear, cosine or poly2"),
        ("--lr-decay linear", "--lr-decay-steps"),
        ("--lr-end 0.1", "--lr-decay"),
    ] {
        let output = run(&format!("{file} {more}"));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{more}: {error}");
    }
    let start = format!("{file} --lr-warmup 9 --lr-decay linear --lr-decay-steps 1 --lr-decay-start 8");
    assert!(run_failing(2, &start).contains("--lr-decay-start: expected at least --lr-warmup, 9, got 8"));
    let twice = run_failing(2, &format!("{line} --name m --data /dev/null --epochs 2"));
    assert!(twice.contains("--epochs: --data must be read twice, but /dev/null is a pipe"), "{twice}");
    let ratio = run_failing(2, &format!("{line} --name m --data /dev/null --valid-ratio 0.1"));
    assert!(ratio.contains("--valid-ratio: "), "{ratio}");
    let dir = run_failing(2, &format!("{line} --name m --follow {valid}"));
    assert!(dir.contains("--follow: ") && dir.contains("not a directory"), "{dir}");
    let both = run(&format!("{file} --follow {}", workshop.models));
    assert!(String::from_utf8(both.stderr).unwrap().contains("cannot be used with"));
}
