//! The settings of a server: reloaded at SIGHUP, refused if they are wrong, and checked and printed without a
//! server.

use std::fs;
use std::path::Path;

use flechette::schema::preset::ArchKind;
use serde_json::{Value, json};

use crate::program::{Served, Workshop, flechette, run, run_failing, run_json};
use crate::switching::wait;

#[test]
fn a_setting_that_fits_no_model_ends_the_server() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let flags = "--grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode on --cache-bytes 1";
    let error = run_failing(2, &format!("serve --models {} {flags}", workshop.models));
    assert!(error.contains("model \"dlrm\"") && error.contains("cache"), "{error}");
}

#[test]
fn a_hangup_reloads_the_settings_that_can_change_and_names_the_others() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let config = workshop.path("serve.toml");
    fs::write(&config, "[models]\nwatch_seconds = 0\n").unwrap();
    let dcn = Path::new(&workshop.models).join("dcn/1");
    fs::create_dir_all(&dcn).unwrap();
    let served = Served::start(&workshop.models, &format!("--config {config}"));
    served.said("model refused; models.watch_seconds is 0, so a client must load it", 1);
    assert!(run(&format!("label --addr {} dlrm stable latest", served.url())).status.success());
    fs::remove_dir_all(dcn.parent().unwrap()).unwrap();
    workshop.train(ArchKind::Dlrm);
    let log = "[log]\nlevel = \"info,h2=off\"\nslow_seconds = 0\n";
    let models = "[models]\nwatch_seconds = 1\n[models.dlrm]\nlabels = {stable = 1}\n\
                  [models.dlmr]\ncanary_share = 1\n";
    let changed = format!("{models}[server]\nmax_samples = 7\n{log}");
    fs::write(&config, &changed).unwrap();
    served.signal("-HUP");
    let version = || served.metric("flechette_serving_version", &["model=\"dlrm\""]);
    wait("the new version is taken over", || version() == 2.0);

    fs::write(&config, "[models]\nwatch_second = 0\n").unwrap();
    served.signal("-HUP");
    workshop.train(ArchKind::Dlrm);
    wait("the directory is still watched", || version() == 3.0);
    served.terminate();
    let (status, log) = served.ended();
    assert!(status.success(), "{log}");
    for words in [
        "SIGHUP: settings changed changed=\"models.watch_seconds, log.level, log.slow_seconds, ",
        "SIGHUP: models.dlmr: there is no model \"dlmr\" in server.models yet",
        "label stable is latest, as a client has set it, and not 1, as in models.dlrm.labels",
        "only a restart applies them settings=\"server.max_samples\"",
        "SIGHUP: the settings are wrong, so nothing changes",
        ":2: unknown key models.watch_second; did you mean models.watch_seconds?",
    ] {
        assert!(log.contains(words), "{words}: {log}");
    }
}

#[test]
fn a_hangup_before_the_settings_are_read_reloads_them_later() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let pipe = workshop.path("settings");
    // The pipe opens when the server reads its settings, and another one in its place when it reloads them.
    let settings = |slow: u32| format!("printf '[log]\\nslow_seconds = {slow}\\n'");
    // The writer must not keep the server's log open: if the server ends, nothing reads the pipe.
    let setup = format!(
        "mkfifo {pipe} {pipe}.next && {{ \
         (exec 2> /dev/null 3> {pipe}; kill -HUP $$; {} >&3; mv {pipe}.next {pipe}; exec 3>&-; \
         {} > {pipe}) & }}",
        settings(1),
        settings(2)
    );
    let served = Served::start_in(&setup, &workshop.models, &format!("--config {pipe}"));
    served.said("SIGHUP: settings changed changed=\"log.slow_seconds\"", 1);
    assert_eq!(served.score("dlrm", &workshop.valid, "")["version"], 1);
}

#[test]
fn an_unknown_name_is_refused_wherever_it_is_given() {
    let workshop = Workshop::new(300, 50);
    workshop.train(ArchKind::Dlrm);
    let (models, file) = (&workshop.models, workshop.path("serve.toml"));
    fs::write(&file, "[server]\nmax_sampels = 5\n").unwrap();
    let error = run_failing(2, &format!("serve --models {models} --config {file}"));
    let words = format!("{file}:2: unknown key server.max_sampels; did you mean server.max_samples?");
    assert!(error.contains(&words), "{error}");
    let mut serve = flechette();
    let serve = serve.args(["serve", "--models", models]).env("FLECHETTE_SERVER_MAX_SAMPLE", "5");
    let output = serve.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("FLECHETTE_SERVER_MAX_SAMPLES?"), "{error}");
    let output = run(&format!("serve --model {models}"));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("'--models'"), "{error}");
}

#[test]
fn settings_can_be_checked_and_printed_without_a_server() {
    let workshop = Workshop::new(1, 1);
    let file = workshop.path("serve.toml");
    fs::write(&file, "[server]\nmodels = \"/nowhere\"\nhttp = \"127.0.0.1:1\"\n").unwrap();
    let valid = run(&format!("config check --config {file}"));
    assert!(valid.status.success() && valid.stdout == b"the settings are valid\n", "{valid:?}");
    let valid = run_json(&format!("config check --config {file} --json"));
    assert_eq!(valid, json!({"valid": true, "errors": [], "warnings": []}));
    for (grpc, warns) in [("0.0.0.0:0", true), ("[::]:0", true), ("127.0.0.2:0", false)] {
        let report = run_json(&format!("config check --config {file} --grpc {grpc} --json"));
        let warnings = report["warnings"].as_array().unwrap();
        assert_eq!(warnings.len(), usize::from(warns), "{report}");
        assert!(warnings.iter().all(|text| text.as_str().unwrap().contains("give auth.admin")), "{report}");
    }
    let printed = run(&format!("config print --config {file} --http 127.0.0.1:2 --cache-bytes 1MiB"));
    let printed = String::from_utf8(printed.stdout).unwrap();
    for line in [
        &format!("models = \"/nowhere\"  # file {file}:2"),
        "http = \"127.0.0.1:2\"  # flag --http",
        "bytes = \"1MiB\"  # flag --cache-bytes",
        "level = \"info\"  # default",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
    fs::write(&file, "[servers]\n[cache]\nmode = \"maybe\"\n").unwrap();
    let wrong = run(&format!("config check --config {file} --grpc nowhere --json"));
    let report: Value = serde_json::from_slice(&wrong.stdout).unwrap();
    assert_eq!(
        (&report["valid"], report["errors"].as_array().unwrap().len()),
        (&json!(false), 3),
        "{report}"
    );
    let errors = String::from_utf8(wrong.stderr).unwrap();
    let words = ["unknown section servers; did you mean server?", "server.grpc (flag --grpc)", "cache.mode"];
    assert_eq!((wrong.status.code(), errors.lines().count()), (Some(2), 3), "{errors}");
    assert!(
        errors.lines().zip(words).all(|(line, words)| line.starts_with("error: ") && line.contains(words))
    );
}

#[test]
fn the_files_that_the_settings_name_can_be_checked_before_a_server_reads_them() {
    let workshop = Workshop::new(1, 1);
    let [file, tokens] = ["serve.toml", "tokens"].map(|name| workshop.path(name));
    let tls = "[tls]\ncertificate = \"/nowhere/certificate\"\nkey = \"/nowhere/key\"\n";
    fs::write(&file, format!("[server]\nmodels = \"/nowhere\"\n{tls}[auth]\npredict = \"{tokens}\"\n"))
        .unwrap();
    fs::write(&tokens, "short\n").unwrap();
    let check = format!("config check --config {file}");
    assert!(run(&check).status.success(), "they may be on another machine");
    let wrong = run(&format!("{check} --files"));
    let errors = String::from_utf8(wrong.stderr).unwrap();
    assert_eq!((wrong.status.code(), errors.lines().count()), (Some(2), 2), "{errors}");
    assert!(errors.contains("/nowhere/certificate") && errors.contains("auth.predict"), "{errors}");
}
